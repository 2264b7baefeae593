/** The build of the page into a folder: node page/build.ts FOLDER */

import { createHash } from "node:crypto";
import { copyFileSync, mkdirSync, readdirSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const HERE = fileURLToPath(new URL(".", import.meta.url));
const ENGINE = "ort-wasm-simd-threaded.wasm";
const OPTIONS = { bundle: true, minify: true, format: "esm", target: "es2023", logLevel: "warning" } as const;

/** Bundle scripts, copy the rest, and compress all of it beside itself. */
export async function buildPage(folder: string): Promise<void> {
  rmSync(folder, { recursive: true, force: true });
  mkdirSync(folder, { recursive: true });
  const entryPoints = {
    page: join(HERE, "page.ts"),
    worker: join(HERE, "../src/web/worker.ts"),
    background: join(HERE, "../src/web/background-worker.ts"),
  };
  await build({ ...OPTIONS, splitting: true, entryPoints, outdir: folder });
  for (const name of ["index.html", "style.css", "manifest.json", "icon.svg"]) {
    copyFileSync(join(HERE, name), join(folder, name));
  }
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

await buildPage(process.argv[2] ?? fileURLToPath(new URL("../dist/page", import.meta.url)));
