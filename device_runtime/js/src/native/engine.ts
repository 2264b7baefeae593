/** The engine of React Native: onnxruntime-react-native, whose native side takes less than its interface says.
 *
 * Read in version 1.24.3, and never run on a phone: a graph given as bytes loses its offset, and options are not read, so
 * a graph is written to a file and loaded from there. A tensor loses its offset too, so its array gets a buffer of its
 * own. Errors come as strings.
 */

import { type Bytes, hex } from "../core/bytes.ts";
import type { Engine, OnnxRuntime } from "../core/engine.ts";
import { sha256 } from "../core/primitives.ts";
import type { Folder } from "./files.ts";
import type { NativeOrt } from "./modules.ts";

/** ONNX Runtime as an app hands it in. version: of onnxruntime-react-native. Graphs are in `folder` while they load. */
export function nativeEngine(ort: NativeOrt, version: string, folder: Folder): Engine {
  async function create(graph: Bytes) {
    const name = `${hex(await sha256(graph))}.onnx`;
    await folder.write(name, graph);
    try {
      return await ort.InferenceSession.create(folder.file(name).uri);
    } finally {
      folder.remove(name);
    }
  }

  class OwnTensor extends ort.Tensor {
    constructor(...[type, data, dims]: ConstructorParameters<OnnxRuntime["Tensor"]>) {
      super(type, data.byteLength === data.buffer.byteLength ? data : data.slice(), dims);
    }
  }

  const runtime = { InferenceSession: { create }, Tensor: OwnTensor } satisfies OnnxRuntime;
  return { ort: runtime, name: `onnxruntime-react-native ${version}` };
}
