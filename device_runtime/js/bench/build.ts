/** The build of the worker of benchmarks beside the files of a page: node bench/build.ts FOLDER */

import { fileURLToPath } from "node:url";
import { build } from "esbuild";

await build({
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2023",
  logLevel: "warning",
  entryPoints: { bench: fileURLToPath(new URL("worker.ts", import.meta.url)) },
  outdir: process.argv[2]!,
});
