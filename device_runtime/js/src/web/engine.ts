/** The engine of browsers: onnxruntime-web as WebAssembly with SIMD, on the one thread of a worker.
 *
 * Loading a graph can take longer than running it, so sessions stay loaded between rounds, up to a size. Their memory
 * comes back when the worker ends.
 */

import * as ort from "onnxruntime-web/wasm";
import { type Bytes, hex } from "../core/bytes.ts";
import type { Engine, OnnxRuntime } from "../core/engine.ts";
import { sha256 } from "../core/primitives.ts";

type Session = Awaited<ReturnType<OnnxRuntime["InferenceSession"]["create"]>>;

const MOST_GRAPH_BYTES = 64 << 20;
/** A run holds the thread. What waits for it, such as answers and timers, gets a turn this often. */
const TURN_MS = 50;

ort.env.wasm.numThreads = 1;

/** ONNX Runtime in this worker. */
export const webEngine: Engine = {
  name: `onnxruntime-web ${ort.env.versions.web ?? ort.env.versions.common}`,
  ort: { Tensor: ort.Tensor as unknown as OnnxRuntime["Tensor"], InferenceSession: { create } },
};

interface Loaded {
  readonly session: ort.InferenceSession;
  readonly bytes: number;
}

/** Sessions by the digest of their graph, the longest unused first. */
const loaded = new Map<string, Loaded>();
/** How often each graph is in use. */
const running = new Map<string, number>();
let turnAt = 0;

async function create(graph: Bytes, options?: ort.InferenceSession.SessionOptions): Promise<Session> {
  const digest = hex(await sha256(graph));
  const { session } = loaded.get(digest) ?? { session: await ort.InferenceSession.create(graph, options) };
  loaded.delete(digest);
  loaded.set(digest, { session, bytes: graph.length });
  running.set(digest, (running.get(digest) ?? 0) + 1);
  return {
    inputNames: session.inputNames,
    outputNames: session.outputNames,
    run: async (feeds: ort.InferenceSession.FeedsType, fetches: readonly string[]) => {
      await letOthersRun();
      return session.run(feeds, fetches);
    },
    release: async () => {
      running.set(digest, (running.get(digest) ?? 1) - 1);
      await trim();
    },
  } as unknown as Session;
}

/** Let go of the longest unused graphs beyond the size. */
async function trim(): Promise<void> {
  let total = [...loaded.values()].reduce((sum, { bytes }) => sum + bytes, 0);
  for (const [digest, { session, bytes }] of [...loaded]) {
    if (total > MOST_GRAPH_BYTES && !running.get(digest)) {
      loaded.delete(digest);
      total -= bytes;
      await session.release();
    }
  }
}

async function letOthersRun(): Promise<void> {
  if (performance.now() - turnAt < TURN_MS) return;
  await new Promise<void>((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
  turnAt = performance.now();
}
