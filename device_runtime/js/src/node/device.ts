/** A device on Node: muster-device --coordinator URL --population NAME --examples FILE.npz --state FOLDER
 *
 * It runs one session and prints the outcome as JSON. `--policy` is a JSON file; its settings: docs/device.md. The exit
 * status is 0 unless the session failed or was given up.
 */

import { readFileSync } from "node:fs";
import { totalmem } from "node:os";
import { setTimeout as sleepMs } from "node:timers/promises";
import { parseArgs } from "node:util";
import { UNKNOWN } from "../core/conditions.ts";
import { ConfigError } from "../core/errors.ts";
import type { Outcome } from "../core/outcome.ts";
import { policyOf } from "../core/permission/policy.ts";
import type { Platform } from "../core/platform.ts";
import { platformRandom } from "../core/primitives.ts";
import { runSession, type SessionConfig } from "../core/session.ts";
import { keptSigningKey } from "../core/signing-keys.ts";
import { nodeEngine } from "./engine.ts";
import { NpzFile } from "./npz.ts";
import { FileBlobs, SqliteStore } from "./store.ts";

const WAIT_S = 60;

/** A session as the words of a command line say it. Throws ConfigError. */
export async function runDevice(words: readonly string[]): Promise<Outcome> {
  const { config, examples, state } = read(words);
  const store = new SqliteStore(state);
  try {
    return await runSession(nodePlatform(store, new FileBlobs(state), new NpzFile(examples)), config);
  } finally {
    store.close();
  }
}

function nodePlatform(store: SqliteStore, blobs: FileBlobs, examples: NpzFile): Platform {
  return {
    store,
    blobs,
    examples,
    engine: nodeEngine,
    signingKey: (name) => keptSigningKey(store, name),
    conditions: async () => UNKNOWN,
    fetch,
    random: platformRandom,
    now: () => Date.now() / 1000,
    workSeconds: () => {
      const { user, system } = process.cpuUsage();
      return (user + system) / 1e6;
    },
    sleep: (seconds) => sleepMs(1000 * seconds),
    memoryBytes: totalmem(),
  };
}

function read(words: readonly string[]): { config: SessionConfig; examples: string; state: string } {
  const option = { type: "string" } as const;
  const named = ["coordinator", "population", "examples", "state"] as const;
  const options = { coordinator: option, population: option, examples: option, state: option, policy: option };
  try {
    const { values } = parseArgs({ args: [...words], options });
    const missing = named.filter((name) => values[name] === undefined);
    if (missing.length > 0) {
      throw new ConfigError(`missing: ${missing.map((name) => `--${name}`).join(", ")}`);
    }
    const settings = values.policy === undefined ? {} : (JSON.parse(readFileSync(values.policy, "utf-8")) as object);
    const coordinator = new URL(values.coordinator!);
    const config = { coordinator, population: values.population!, policy: policyOf(settings), waitS: WAIT_S };
    return { config, examples: values.examples!, state: values.state! };
  } catch (error) {
    throw error instanceof ConfigError ? error : new ConfigError(String(error));
  }
}
