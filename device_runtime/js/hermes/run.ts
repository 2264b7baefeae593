/** Hermes, React Native's engine: its compiler takes the package, and its virtual machine gives the vectors' answers.
 *
 * `npm run hermes` installs both from npm. The compiler is that of React Native. The only virtual machine on npm is of an
 * earlier version, which knows no classes, so that Babel lowers the code for it. It prints its answers and times.
 */

import { execFileSync } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { build } from "esbuild";

const HERE = new URL(".", import.meta.url).pathname;
const NATIVE = `${process.platform === "darwin" ? "osx" : "linux64"}-bin`;
const packages = createRequire(import.meta.url);
const VECTORS = new URL("../../../tests/vectors/", import.meta.url);
const NAMES = ["device", "noise", "order", "secagg/known_answers", "secagg/transcript"];
const texts = Object.fromEntries(NAMES.map((name) => [name, readFileSync(new URL(`${name}.json`, VECTORS), "utf-8")]));
const program = (path: string) => join(HERE, "node_modules", path);

/** One script of a module and all that it imports. Metro lowers async generators too. */
async function bundle(name: string, to: string): Promise<void> {
  await build({
    entryPoints: [join(HERE, name)],
    outfile: to,
    bundle: true,
    format: "iife",
    target: "es2020",
    supported: { "async-generator": false, "for-await": false },
    define: { VECTORS: JSON.stringify(texts) },
    logLevel: "error",
  });
}

const folder = mkdtempSync(join(tmpdir(), "hermes-"));
try {
  const [phone, bytecode, vectors, lowered] = ["phone.js", "phone.hbc", "vectors.js", "lowered.js"].map((name) =>
    join(folder, name),
  ) as [string, string, string, string];
  await bundle("phone.ts", phone);
  execFileSync(program(`hermes-compiler/hermesc/${NATIVE}/hermesc`), [
    "-O",
    "-emit-binary",
    "-w",
    "-out",
    bytecode,
    phone,
  ]);
  console.log(`compiled: ${statSync(phone).size} bytes of JavaScript, ${statSync(bytecode).size} of bytecode`);
  await bundle("vectors.ts", vectors);
  const babel = packages("@babel/core");
  const env = [
    packages.resolve("@babel/preset-env"),
    { targets: "ie 11", exclude: ["transform-exponentiation-operator"] },
  ];
  writeFileSync(lowered, babel.transformFileSync(vectors, { presets: [env], compact: true, configFile: false }).code);
  execFileSync(program(`hermes-engine-cli/${NATIVE}/hermes`), ["-w", "-O", lowered], { stdio: "inherit" });
} finally {
  rmSync(folder, { recursive: true });
}
