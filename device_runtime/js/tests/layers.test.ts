/** The core imports no platform: only itself and the libraries that run anywhere. */

import { readdirSync, readFileSync } from "node:fs";
import { expect, test } from "vitest";
import { VERSION } from "../src/core/sessions/session.ts";

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
