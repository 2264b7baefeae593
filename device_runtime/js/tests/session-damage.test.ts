/** Whole sessions whose answers are damaged: each ends with an outcome, and no promise is left to reject. */

import { afterAll, beforeAll, expect, test } from "vitest";
import { type Bytes, fromHex, hex, utf8 } from "../src/core/bytes.ts";
import { platformRandom, sha256 } from "../src/core/cryptography.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import { encodeVector } from "../src/core/plans/checkpoint.ts";
import { keptSigningKey, type Platform, UNKNOWN } from "../src/core/platform.ts";
import { runSession } from "../src/core/sessions/session.ts";
import { nodeEngine } from "../src/node/engine.ts";
import { damaged, PATIENCE_MS, TIMES } from "./damage.ts";
import { MemoryStore } from "./memory-store.ts";
import { floats, vectors } from "./vectors.ts";

const SESSIONS = TIMES / 4;
const { runner } = vectors("device.json");
const OUTCOMES = ["reported", "rejected", "not-needed", "not-now", "aborted", "failed"];
const loose: unknown[] = [];
const note = (error: unknown) => void loose.push(error);
beforeAll(() => void process.on("unhandledRejection", note));
afterAll(() => void process.off("unhandledRejection", note));

test("a session of good answers reports", async () => {
  expect(await session(-1)).toMatchObject({ outcome: "reported", steps: runner.steps });
});

test(
  "a session ends with an outcome, whichever answer is damaged",
  async () => {
    const found = new Set<string>();
    for (let seed = 0; seed < SESSIONS; seed++) {
      const { outcome, reason } = await session(seed);
      expect(OUTCOMES, `seed ${seed}`).toContain(outcome);
      expect(reason !== "" || outcome === "reported", `seed ${seed}`).toBe(true);
      found.add(`${outcome} ${reason}`);
    }
    expect(found).toContain("failed bad-answer");
    expect(loose).toEqual([]);
  },
  PATIENCE_MS,
);

/** The outcome of a session, of whose eleven answers one is damaged: none for -1. */
async function session(seed: number) {
  const store = new MemoryStore();
  let asked = 0;
  const answers = await coordinator();
  const platform: Platform = {
    store,
    blobs: { get: async () => null, put: async () => {}, trim: async () => {} },
    engine: nodeEngine,
    examples: {
      counts: async () => new Map([["default", runner.examples]]),
      countRecent: async () => 0,
      load: async () => ({
        count: runner.examples,
        columns: new Map([
          ["x", { shape: [3], values: floats(runner.x) }],
          ["y", { shape: [], values: floats(runner.y) }],
        ]),
      }),
    },
    signingKey: (name) => keptSigningKey(store, name),
    conditions: async () => UNKNOWN,
    fetch: async (url, { body } = {}) => {
      const answer = await answers(new URL(String(url)).pathname, body as Bytes | undefined);
      return asked++ === seed % 11 ? spoiled(answer, seed) : response(answer, 200);
    },
    random: platformRandom,
    now: () => 1e9,
    workSeconds: () => 0,
    sleep: async () => {},
    memoryBytes: null,
  };
  const config = { coordinator: new URL("http://fl.example"), population: "p", policy: policyOf({}), waitS: 1 };
  return runSession(platform, config);
}

/** An answer in bytes and in its status, or none at all. */
function spoiled(answer: Bytes, seed: number): Response {
  if (seed % 13 === 0) throw new TypeError("fetch failed");
  const statuses = [200, 200, 200, 200, 401, 404, 410, 503];
  return response(damaged(answer, seed), statuses[seed % statuses.length]!);
}

function response(body: Bytes, status: number): Response {
  const type = body[0] === 0x7b ? "application/json" : "application/octet-stream";
  return new Response(body, { status, headers: { "content-type": type } });
}

/** What answers a request by its path. */
async function coordinator() {
  const checkpoint = encodeVector("params", floats(runner.params));
  const parts = [utf8(runner.plan), checkpoint, ...Object.values<string>(runner.graphs).map(fromHex)];
  const digests = await Promise.all(parts.map(async (part) => hex(await sha256(part))));
  const blobs = new Map(digests.map((digest, place) => [digest, parts[place]!]));
  const [plan, model] = [0, 1].map((place) => ({ sha256: digests[place], size: parts[place]!.length }));
  const { round, seed, slot } = runner;
  const where = `"round": ${round}, "attempt": 1, "seed": ${seed}, "slot": ${slot}`;
  const what = `"assignment": "a-1", "task": "t-1", "plan": ${JSON.stringify(plan)}, "checkpoint": ${JSON.stringify(model)}`;
  const window = '"retry": {"min_s": 5, "max_s": 30}';
  return async (path: string, body?: Bytes): Promise<Bytes> => {
    if (path.endsWith("/devices")) return utf8('{"device": "d-0"}');
    if (path.endsWith("/checkins")) {
      const offers = '[{"task": "t-1", "collection": "default"}]';
      return utf8(`{"outcome": "accepted", "version": 1, "session": "s-1", "offers": ${offers}, ${window}}`);
    }
    if (path.endsWith("/assignments")) {
      return utf8(`{"outcome": "assigned", "version": 1, ${what}, ${where}, "report_within_s": 60}`);
    }
    if (path.endsWith("/report")) {
      const digest = hex(await sha256(body ?? new Uint8Array()));
      return utf8(`{"assignment": "a-1", "task": "t-1", "round": ${round}, "sha256": "${digest}"}`);
    }
    return blobs.get(path.split("/").at(-1)!) ?? new Uint8Array();
  };
}
