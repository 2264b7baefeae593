/** The command of a device on Node: what it says to those who err, and its exit codes. */

import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { visible } from "../src/core/bytes.ts";
import { main } from "../src/node/command.ts";

const HERE = fileURLToPath(import.meta.url);
let folder = "";
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), "device-"));
  writeFileSync(join(folder, "not.json"), '{"signers":\n [],\n}');
  writeFileSync(join(folder, "https.json"), '{"require_https": true}');
});
afterEach(() => {
  rmSync(folder, { recursive: true });
});

test("help teaches the command, and no words are answered with it too", async () => {
  expect(await said("--help")).toEqual([0, expect.stringContaining("npx @muster-fl/device run")]);
  expect(await said("run", "--help")).toEqual([0, expect.stringContaining("75 when there was no work")]);
  expect((await said())[0]).toBe(2);
});

test.each<[string, string[], RegExp]>([
  ["another command", ["walk"], /no command walk, but `run`/],
  ["nothing", ["run"], /missing: --coordinator, --population, --examples/],
  ["an unknown option", ["run", "--polcy", "x"], /'--polcy'/],
  ["no URL", [...given(), "--coordinator", "fl.example"], /--coordinator must be a URL/],
  ["a URL with a user", [...given(), "--coordinator", "http://me@x"], /without a user/],
  ["examples that are not there", [...given(), "--examples", "/nowhere.npz"], /no examples at \/nowhere.npz/],
  ["a folder without examples", [...given(), "--examples", dirname(HERE)], /no examples at .*tests: an .npz file/],
  ["a label without a value", [...given(), "--label", "region"], /^error: label "region" is not like region=eu$/],
  ["a label twice", [...given(), "--label", "ring=a=b", "--label", "ring=c"], /^error: label ring is given twice$/],
  ["a label too long", [...given(), "--label", `ring=${"x".repeat(65)}`], /label ring: .* 1 to 64 bytes, not 65$/],
  [
    "a secret that is not there",
    [...given(), "--enrolment-secret-file", "/nowhere", "--once"],
    /secret \/nowhere cannot be/,
  ],
  [
    "a secret that is none",
    [...given(), "--enrolment-secret-file", "/dev/null", "--once"],
    /secret \/dev\/null is empty/,
  ],
  ["a policy that is not there", [...given(), "--policy", "/nowhere.json"], /policy \/nowhere.json cannot be read/],
  ["a policy that is no JSON", [...given(), "--policy", "not.json"], /^error: policy .*not.json cannot be read: .+$/],
])("%s is refused with exit code 2", async (_, words, message) => {
  const [code, text] = await said(...words.map((word) => (word.endsWith("not.json") ? join(folder, word) : word)));
  expect([code, text]).toEqual([2, expect.stringMatching(message)]);
  expect(text).not.toContain("\n");
});

test("text of strangers is shown without its controls, and the rest as it is", async () => {
  const hostile = "ok\u001b[2K\u009b31m\u202eelif\u2066\u200b\u2028\ufeff\u3164\ufe0f\u{e0041}\n";
  const shown = "ok\\u001b[2K\\u009b31m\\u202eelif\\u2066\\u200b\\u2028\\ufeff\\u3164\\ufe0f\\udb40\\udc41\\u000a";
  expect(visible(hostile)).toBe(shown);
  expect(JSON.parse(`"${shown}"`)).toBe(hostile);
  const plain = "naïve Größe Ελληνικά עברית العربية 日本語 🙂 – × … C:\\x1b";
  expect(visible(plain)).toBe(plain);
  const policy = join(folder, "hostile.json");
  writeFileSync(policy, JSON.stringify({ [hostile]: 1 }));
  expect(await said(...given(), "--policy", policy)).toEqual([2, expect.stringContaining(shown)]);
});

test("a session that its owner's policy forbids is no work now", async () => {
  const words = [...given(), "--state", join(folder, "state"), "--policy", join(folder, "https.json"), "--once"];
  expect(await said(...words)).toEqual([75, expect.stringContaining("not-now policy")]);
  expect(await said(...words, "--json")).toEqual([75, expect.stringContaining('"outcome":"not-now"')]);
});

test("a state folder that cannot be used is a failure", async () => {
  writeFileSync(join(folder, "state.db"), "x".repeat(5000));
  expect(await said(...given(), "--state", folder, "--once")).toEqual([1, expect.stringContaining("cannot be used")]);
});

function given(): string[] {
  return ["run", "--coordinator", "http://127.0.0.1:1", "--population", "p", "--examples", HERE];
}

/** The exit code of a command, and what it printed. */
async function said(...words: string[]): Promise<[number, string]> {
  const printed: string[] = [];
  const spies = (["log", "error"] as const).map((name) =>
    vi.spyOn(console, name).mockImplementation((text: string) => void printed.push(text)),
  );
  const code = await main(words);
  for (const spy of spies) spy.mockRestore();
  return [code, printed.join("\n")];
}
