/** The command `muster-device`: its words, its help, and its exit codes, which are those of Python's `muster device`. */

import { existsSync, readdirSync, readFileSync, statSync } from "node:fs";
import { join } from "node:path";
import { parseArgs } from "node:util";
import { visible } from "../core/bytes.ts";
import { ConfigError, DeviceError } from "../core/errors.ts";
import type { Outcome } from "../core/kept/sessions.ts";
import { labelsOf, policyOf } from "../core/permission/policy.ts";
import { runForever } from "../core/sessions/scheduler.ts";
import { runSession, type SessionConfig } from "../core/sessions/session.ts";
import type { NodePlatform } from "./device.ts";
import { isExamples } from "./npz.ts";

const HELP = `muster-device run --coordinator URL --population NAME --examples PATH

Check in, train when selected, report; again and again unless --once. Examples never leave the device.

  --coordinator URL  the coordinator's URL
  --population NAME  the population to serve
  --examples PATH    local examples: an .npz file with an array for each field, whose first axis counts examples, or a
                     folder of such files, each the collection of its name; a single file is the collection "default"
  --state DIR        where the device keeps its identity, its journal and plans  [device]
  --policy FILE      what this device may do: a JSON file with the settings of docs/device.md  [policy.json in the state
                     folder; without one, any plan of a plain round, no secure round]
  --label NAME=VALUE what this device is, such as region=eu: told if the policy's labels list the name; may be repeated
  --enrolment-secret-file FILE
                     a file with the secret that coordinator and authority want devices to know  [none]
  --once             run one session and end
  --json             print outcomes as JSON, one on a line
  --help             print this

With --once the exit code is 0 when the session reported, 75 when there was no work now, and 1 when it failed. It is 2
for an option, a policy or examples that are none.

  npx @muster-fl/device run --coordinator http://127.0.0.1:8080 --population digits --examples mine.npz --once
`;
const CODES = { reported: 0, rejected: 75, "not-needed": 75, "not-now": 75, aborted: 1, failed: 1 };
const WAIT_S = 30;

interface Given {
  readonly config: SessionConfig;
  readonly examples: string;
  readonly state: string;
  readonly secret: string | undefined;
  readonly once: boolean;
  readonly json: boolean;
}

/** Run the command that the words name, and print what comes of it; the exit code. */
export async function main(words: readonly string[]): Promise<number> {
  if (words.length === 0 || words.includes("--help") || words.includes("-h")) {
    console.log(HELP);
    return words.length === 0 ? 2 : 0;
  }
  try {
    return await run(read(words));
  } catch (error) {
    if (!(error instanceof DeviceError)) throw error;
    console.error(visible(`error: ${error.message}`));
    return error instanceof ConfigError ? 2 : 1;
  }
}

async function run(given: Given): Promise<number> {
  const platform = await open(given);
  const tell = (outcome: Outcome) => console.log(visible(given.json ? JSON.stringify(outcome) : inWords(outcome)));
  try {
    if (!given.once) {
      await runForever(platform, given.config, tell, new AbortController().signal);
      return 0;
    }
    const outcome = await runSession(platform, given.config);
    tell(outcome);
    return outcome.reason === "conditions" ? 75 : CODES[outcome.outcome];
  } finally {
    platform.close();
  }
}

/** The engine is loaded here and not before: help needs none. */
async function open({ state, examples, secret }: Given): Promise<NodePlatform> {
  try {
    const { NodePlatform, NpzExamples, secretIn } = await import("./device.ts");
    return new NodePlatform(state, new NpzExamples(examples), secret === undefined ? undefined : secretIn(secret));
  } catch (error) {
    if ((error as { code?: string }).code !== "ERR_MODULE_NOT_FOUND") throw error;
    throw new ConfigError(
      "what runs the graphs is missing: npm install onnxruntime-node, or " +
        "npx --package @muster-fl/device --package onnxruntime-node muster-device run …",
    );
  }
}

function read(words: readonly string[]): Given {
  const [command, ...rest] = words;
  if (command !== "run") {
    throw new ConfigError(`there is no command ${command}, but \`run\`; --help says more`);
  }
  const values = valuesOf(rest);
  const missing = (["coordinator", "population", "examples"] as const).filter((name) => values[name] === undefined);
  if (missing.length > 0) {
    throw new ConfigError(`missing: ${missing.map((name) => `--${name}`).join(", ")}; --help says more`);
  }
  const [examples, state] = [values.examples!, values.state ?? "device"];
  if (!existsSync(examples) || (statSync(examples).isDirectory() && !readdirSync(examples).some(isExamples))) {
    throw new ConfigError(`there are no examples at ${examples}: an .npz file is wanted, or a folder of them`);
  }
  const policy = policyIn(values.policy ?? null, state);
  const [coordinator, labels] = [addressOf(values.coordinator!), labelsOf(values.label ?? [])];
  const config = { coordinator, population: values.population!, policy, waitS: WAIT_S, labels };
  const secret = values["enrolment-secret-file"];
  return { config, examples, state, secret, once: values.once === true, json: values.json === true };
}

function valuesOf(words: readonly string[]) {
  const [text, flag] = [{ type: "string" }, { type: "boolean" }] as const;
  const named = { coordinator: text, population: text, examples: text, state: text, policy: text };
  const label = { ...text, multiple: true } as const;
  const options = { ...named, "enrolment-secret-file": text, label, once: flag, json: flag };
  try {
    return parseArgs({ args: [...words], options }).values;
  } catch (error) {
    throw new ConfigError(`${(error as Error).message.split(". ")[0]}; --help says more`);
  }
}

function addressOf(coordinator: string): URL {
  const url = URL.parse(coordinator);
  if (url === null || !["http:", "https:"].includes(url.protocol) || url.username !== "" || url.search !== "") {
    throw new ConfigError(
      "--coordinator must be a URL that starts with https:// or http://, without a user or a query",
    );
  }
  return url;
}

function policyIn(file: string | null, state: string) {
  const path = file ?? join(state, "policy.json");
  if (file === null && !existsSync(path)) return policyOf({});
  let settings: object;
  try {
    settings = JSON.parse(readFileSync(path, "utf-8")) as object;
  } catch (error) {
    // Words about JSON quote some of it, with its lines.
    throw new ConfigError(`policy ${path} cannot be read: ${(error as Error).message.replaceAll(/\s+/g, " ")}`);
  }
  try {
    return policyOf(settings);
  } catch (error) {
    throw new ConfigError(`policy ${path}: ${(error as Error).message}`);
  }
}

function inWords({ outcome, reason, task, round, detail, told }: Outcome): string {
  return [outcome, reason, task && `task ${task} round ${round}`, told || detail].filter(Boolean).join(" ");
}
