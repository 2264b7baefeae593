/** The build of the page into a folder: node page/build.ts [FOLDER [COORDINATOR…]]
 *
 * `device.js` beside it is `@muster-fl/device/web` for pages of others, as in examples/web.
 *
 * A page that another server hosts takes part at the coordinators with these URLs and at no others; without any it takes
 * part at the coordinator that serves it.
 */

import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const NONE = '<meta name="coordinators" content="">';
const ENGINE = "ort-wasm-simd-threaded.wasm";
const OPTIONS = { bundle: true, minify: true, format: "esm", target: "es2023", logLevel: "warning" } as const;

/** Bundle scripts, copy the rest, and compress all of it beside itself. */
async function buildPage(folder: string, coordinators: readonly string[]): Promise<void> {
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
  const entryPoints = {
    page: join(HERE, "page.ts"),
    device: join(HERE, "../src/web/device.ts"),
    worker: join(HERE, "../src/web/worker.ts"),
    background: join(HERE, "../src/web/background-worker.ts"),
  };
  await build({ ...OPTIONS, splitting: true, entryPoints, outdir: folder });
  for (const name of ["style.css", "manifest.json", "icon.svg"]) {
    copyFileSync(join(HERE, name), join(folder, name));
  }
  const page = readFileSync(join(HERE, "index.html"), "utf-8");
  const named = NONE.replace('""', () => `"${coordinators.map((one) => new URL(one).href).join(" ")}"`);
  writeFileSync(
    join(folder, "index.html"),
    page.replace(NONE, () => named),
  );
  copyFileSync(fileURLToPath(import.meta.resolve(`onnxruntime-web/${ENGINE}`)), join(folder, ENGINE));
  const files = readdirSync(folder).sort();
  const digest = createHash("sha256");
  for (const name of files) digest.update(readFileSync(join(folder, name)));
  const define = { FILES: JSON.stringify(files), VERSION: JSON.stringify(digest.digest("hex").slice(0, 12)) };
  const script = join(HERE, "service-worker.ts");
  await build({ ...OPTIONS, define, entryPoints: [script], outdir: folder });
  for (const name of readdirSync(folder)) {
    writeFileSync(join(folder, `${name}.gz`), gzipSync(readFileSync(join(folder, name)), { level: 9 }));
  }
}

const [folder = fileURLToPath(new URL("../dist/page", import.meta.url)), ...coordinators] = process.argv.slice(2);
await buildPage(folder, coordinators);
