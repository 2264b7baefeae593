/** React Native's adapters, on doubles of its modules: state is sealed, graphs come from files, conditions are known. */

import { mkdtempSync, readdirSync, rmSync, utimesSync } from "node:fs";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { afterEach, beforeEach, expect, test } from "vitest";
import { fromHex, hex, utf8 } from "../src/core/bytes.ts";
import { platformRandom } from "../src/core/cryptography.ts";
import { PlanRefused, RuntimeFailed, StateDamaged } from "../src/core/errors.ts";
import type { Outcome } from "../src/core/kept/sessions.ts";
import { Graph } from "../src/core/plans/engine.ts";
import { decodePlan } from "../src/core/plans/plan.ts";
import { execute } from "../src/core/plans/runner.ts";
import { allowSessions, defineSessions, forbidSessions } from "../src/native/device.ts";
import { appIntegrity, nativeEngine, phoneConditions } from "../src/native/platform.ts";
import { FileBlobs, Folder, Keychain, SealedStore } from "../src/native/storage.ts";
import { FakeBackground, FakeDatabase, FakeSecureStore, fakeFiles, fakeOrt } from "./phone.ts";
import { bytesOf, floats, vectors } from "./vectors.ts";

let cache = "";
beforeEach(() => {
  cache = mkdtempSync(join(tmpdir(), "phone-"));
});
afterEach(() => {
  rmSync(cache, { recursive: true });
});

const { runner } = vectors("device.json");

async function opened(database = new FakeDatabase(), secrets = new FakeSecureStore()) {
  return SealedStore.of(database, new Keychain(secrets, platformRandom), platformRandom);
}

test("a phone trains to Python's report", async () => {
  const engine = nativeEngine(fakeOrt, "1.24.3", new Folder(fakeFiles(cache), "graphs"));
  const graphs = new Map<string, Graph>();
  for (const [name, bytes] of Object.entries<string>(runner.graphs)) {
    graphs.set(name, await Graph.load(engine, fromHex(bytes), name));
  }
  const columns = new Map([
    ["x", { shape: [3], values: floats(runner.x) }],
    ["y", { shape: [], values: floats(runner.y) }],
  ]);
  const whole = Float32Array.of(9, ...floats(runner.params)); // a view behind other values, as of a checkpoint
  const found = await execute({
    engine,
    graphs,
    plan: decodePlan(utf8(runner.plan), 1),
    broadcast: new Map([["params", whole.subarray(1)]]),
    frozen: new Map(),
    examples: { count: runner.examples, columns },
    key: { seed: BigInt(runner.seed), round: runner.round, slot: BigInt(runner.slot), secret: new Uint8Array() },
    keepGoing: () => true,
  });
  expect(hex(bytesOf(found.values))).toBe(runner.values);
  expect(readdirSync(join(cache, "graphs"))).toEqual([]);
});

test("strings that the native side throws become errors with a name", async () => {
  const engine = nativeEngine(fakeOrt, "1.24.3", new Folder(fakeFiles(cache), "graphs"));
  const bytes = fromHex(runner.graphs["train.step"]);
  const graph = await Graph.load(engine, bytes, "train.step");
  const { Tensor } = engine.ort;
  const names = ["carry.params", "broadcast.params", "example.x", "example.y", "mask"];
  const bad = Object.fromEntries(names.map((name) => [name, new Tensor("float32", new Float32Array(1), [1])]));
  await expect(graph.run(bad, new Map())).rejects.toThrow(RuntimeFailed);
  const cut = { ...engine, ort: { ...engine.ort, InferenceSession: { create: () => Promise.reject("no memory") } } };
  await expect(Graph.load(cut, bytes, "train.step")).rejects.toThrow(PlanRefused);
});

test("what a phone keeps is sealed, and survives a restart", async () => {
  const [database, secrets] = [new FakeDatabase(), new FakeSecureStore()];
  const store = await opened(database, secrets);
  await Promise.all([store.write({ a: "private", b: "" }), store.write({ c: "3" })]);
  await store.write({ c: null });
  const again = await opened(database, secrets);
  expect([await again.get("a"), await again.get("b"), await again.get("c")]).toEqual(["private", "", null]);
  const kept = JSON.stringify(database.sqlite.prepare("SELECT * FROM kept").all());
  expect(kept).not.toContain("private");
  expect(secrets.kept.size).toBe(1);
});

test("a write that fails changes nothing", async () => {
  const database = new FakeDatabase();
  const store = await opened(database);
  await store.write({ a: "1" });
  database.sqlite.exec(
    "CREATE TRIGGER full BEFORE INSERT ON kept WHEN NEW.key = 'b' BEGIN SELECT RAISE(FAIL, 'full'); END",
  );
  await expect(store.write({ a: "2", b: "3" })).rejects.toThrow(StateDamaged);
  expect(await store.get("a")).toBe("1");
});

test("state under another key, or moved to another place, is said to be damaged", async () => {
  const database = new FakeDatabase();
  const store = await opened(database);
  await store.write({ a: "1", b: "2" });
  const other = await opened(database);
  await expect(other.get("a")).rejects.toThrow(StateDamaged);
  database.sqlite.exec("UPDATE kept SET value = (SELECT value FROM kept WHERE key = 'a') WHERE key = 'b'");
  await expect(store.get("b")).rejects.toThrow(/b does not open/);
});

test("a signing key of a phone stays the same, and a wrong one is said to be none", async () => {
  const secrets = new FakeSecureStore();
  const key = await new Keychain(secrets, platformRandom).signingKey("device");
  const again = await new Keychain(secrets, platformRandom).signingKey("device");
  expect(again.public).toEqual(key.public);
  secrets.kept.set("muster.key.device", "short");
  await expect(new Keychain(secrets, platformRandom).signingKey("device")).rejects.toThrow(StateDamaged);
});

test("blobs are files, and the longest unused go first", async () => {
  const folder = new Folder(fakeFiles(cache), "blobs");
  const blobs = new FileBlobs(folder);
  await blobs.trim(0, new Set()); // there is no folder yet
  for (const [at, name] of ["oldest", "older", "newest"].entries()) {
    await blobs.put(name, new Uint8Array(10).fill(at));
    utimesSync(join(cache, "blobs", name), at, at);
  }
  const restarted = new FileBlobs(folder);
  expect(await restarted.get("oldest")).toEqual(new Uint8Array(10)); // used just now
  await restarted.trim(20, new Set());
  expect(await restarted.get("older")).toBeNull();
  expect(await restarted.get("newest")).not.toBeNull();
  utimesSync(join(cache, "blobs", "oldest"), 4e9, 4e9); // by a clock that was ahead
  await new FileBlobs(folder).trim(10, new Set());
  expect(await restarted.get("oldest")).toBeNull();
});

test.each([
  [
    { batteryLevel: 0.5, batteryState: 2, lowPowerMode: false },
    { charging: true, battery: 0.5 },
  ],
  [
    { batteryLevel: 1, batteryState: 3, lowPowerMode: true },
    { charging: false, battery: 1 },
  ],
  [
    { batteryLevel: 0.9, batteryState: 4, lowPowerMode: false },
    { charging: false, battery: 0.9 },
  ],
  [
    { batteryLevel: -1, batteryState: 0, lowPowerMode: false },
    { charging: null, battery: null },
  ],
])("the power state %o means %o", async (power, expected) => {
  const network = { fetch: async () => ({ details: null }) };
  const now = await phoneConditions({ getPowerStateAsync: async () => power }, network, fakeFiles(cache));
  expect(now).toEqual({ ...expected, idle: null, unmetered: null, freeStorageBytes: 5e9 });
});

test.each([
  [{ isConnectionExpensive: true }, false],
  [{ isConnectionExpensive: false }, true],
  [null, null],
])("a network with details %o is unmetered: %s", async (details, unmetered) => {
  const power = { batteryLevel: 1, batteryState: 2, lowPowerMode: false };
  const network = { fetch: async () => ({ details }) };
  const now = await phoneConditions({ getPowerStateAsync: async () => power }, network, fakeFiles(cache));
  expect(now.unmetered).toBe(unmetered);
});

test.each([
  ["android", { kind: "android-key", chain: [Uint8Array.of(0, 1), Uint8Array.of(255)] }],
  ["ios", { kind: "app-attest", statement: Uint8Array.of(171) }],
])("on %s a new key is attested for the challenge as a text", async (system, expected) => {
  const asked: string[] = [];
  const names = new Set<string>();
  const attest = appIntegrity(
    {
      async generateHardwareAttestedKeyAsync(name, challenge) {
        names.add(name);
        asked.push(challenge);
      },
      getAttestationCertificateChainAsync: async (name) => (names.has(name) ? ["AAE=", "/w=="] : []),
      generateKeyAsync: async () => "a new key",
      async attestKeyAsync(key, challenge) {
        if (key === "a new key") asked.push(challenge);
        return "qw==";
      },
    },
    system,
  );
  expect(await attest(Uint8Array.of(0, 171, 255))).toEqual(expected);
  expect(asked).toEqual(["00abff"]);
});

test("sessions run in the background once they are allowed, until they are forbidden", async () => {
  const modules = new FakeBackground();
  let outcome = "reported";
  defineSessions(modules, async () => ({ outcome }) as Outcome);
  await forbidSessions(modules); // were never allowed
  await allowSessions(modules, 1);
  expect(modules.registered).toEqual(new Map([["muster-session", 15]]));
  const work = modules.defined.get("muster-session")!;
  expect(await work()).toBe(1);
  outcome = "failed";
  expect(await work()).toBe(2);
  await forbidSessions(modules);
  expect(modules.registered.size).toBe(0);
});
