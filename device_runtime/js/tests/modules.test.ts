/** Modules: what one exports another imports, and the core imports no platform. What the package offers is exempt. */

import { readdirSync, readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { VERSION } from "../src/core/sessions/session.ts";

const ROOT = new URL("../", import.meta.url);
const { exports, bin } = JSON.parse(readFileSync(new URL("package.json", ROOT), "utf-8")) as Record<
  "exports" | "bin",
  Record<string, string>
>;
const OFFERED = [...Object.values(exports), ...Object.values(bin)].map(
  (path) => new URL(path.replace("dist", "src").replace(".js", ".ts"), ROOT).href,
);
const SOURCES = new Map(
  ["src", "page", "bench", "tests", "hermes"].flatMap((folder) =>
    readdirSync(new URL(folder, ROOT), { recursive: true, encoding: "utf-8" })
      .filter((name) => name.endsWith(".ts") && !name.includes("node_modules"))
      .map((name) => new URL(`${folder}/${name}`, ROOT).href)
      .map((href) => [href, readFileSync(new URL(href), "utf-8")] as const),
  ),
);

/** What is imported of each module: its names, and "*" for all of a module that is exported again. */
const IMPORTED = new Map<string, Set<string>>([...SOURCES.keys()].map((href) => [href, new Set()]));
for (const [href, source] of SOURCES) {
  const found = source.matchAll(/\b(?:import|export)\s+(?:type\s+)?(\{[^}]*\}|\*)[^"';]*?\bfrom\s+"(\.[^"]+)"/g);
  for (const [, names, from] of found) {
    if (names === "*") continue;
    for (const name of names!.replace(/[{}]|\btype\b/g, "").split(",")) {
      IMPORTED.get(new URL(from!, href).href)?.add(name.trim().split(/\s+as\s+/)[0]!);
    }
  }
  for (const [, from] of source.matchAll(/\bexport\s+(?:type\s+)?\*\s+from\s+"(\.[^"]+)"/g)) {
    IMPORTED.get(new URL(from!, href).href)?.add("*");
  }
  for (const [, alias, from] of source.matchAll(/\bimport\s+(?:type\s+)?\*\s+as\s+(\w+)\s+from\s+"(\.[^"]+)"/g)) {
    const used = [...source.matchAll(new RegExp(`\\b${alias}\\s*\\.(\\w+)`, "g"))].map(([, name]) => name!);
    for (const name of used) IMPORTED.get(new URL(from!, href).href)?.add(name);
  }
  for (const [, names, from] of source.matchAll(/\{([^}]*)\}\s*=\s*await\s+import\("(\.[^"]+)"\)/g)) {
    for (const name of names!.split(",")) IMPORTED.get(new URL(from!, href).href)?.add(name.trim().split(":")[0]!);
  }
}

test.each([...SOURCES.keys()].filter((href) => /\/(?:src|page)\//.test(href) && !OFFERED.includes(href)))(
  "%s exports nothing in vain",
  (href) => {
    const declared =
      /^export (?:declare |async |abstract )*(?:const|let|function\*?|class|interface|type|enum) (\w+)/gm;
    const names = [...SOURCES.get(href)!.matchAll(declared)].map(([, name]) => name!);
    const wanted = IMPORTED.get(href)!;
    expect(names.filter((name) => !wanted.has("*") && !wanted.has(name))).toEqual([]);
  },
);

const CORE = new URL("../src/core/", import.meta.url);
const LIBRARIES = ["@noble", "lossless-json", "onnxruntime-common", "valibot"];
const MODULES = readdirSync(CORE, { recursive: true, encoding: "utf-8" }).filter((name) => name.endsWith(".ts"));

test.each(MODULES)("core/%s imports the core and portable libraries alone", (name) => {
  const source = readFileSync(new URL(name, CORE), "utf-8");
  const imported = [...source.matchAll(/\b(?:from|import)\s*\(?"([^"]+)"/g)].map(([, from]) => from!);
  const inside = (from: string) =>
    from.startsWith(".") && new URL(from, new URL(name, CORE)).href.startsWith(CORE.href);
  expect(
    imported.filter(
      (from) => !inside(from) && !LIBRARIES.some((library) => from === library || from.startsWith(`${library}/`)),
    ),
  ).toEqual([]);
  expect(source).not.toMatch(/\b(process|Buffer|window|document|__dirname)\./);
  expect(source.split("\n").length).toBeLessThan(450);
});

test("the version that a coordinator is told is the package's", () => {
  const { version } = JSON.parse(readFileSync(new URL("../package.json", import.meta.url), "utf-8")) as {
    version: string;
  };
  expect(VERSION).toBe(version);
});
