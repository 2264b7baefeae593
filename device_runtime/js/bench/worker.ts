/** Blocks of work in a browser's worker: a message in, a message out. Paths of work are URLs.
 *
 * The engine is that of the page's own worker.
 */

import { webEngine } from "../src/web/platform.ts";
import { type Asked, Blocks } from "./blocks.ts";

const blocks = new Blocks(
  webEngine,
  (folder) => async (path) => new Uint8Array(await (await fetch(`${folder}/${path}`)).arrayBuffer()),
);

self.onmessage = ({ data }: MessageEvent<Asked>) => {
  blocks.answer(data).then(
    (answer) => self.postMessage(answer),
    (error: unknown) => self.postMessage({ failed: String(error) }),
  );
};
