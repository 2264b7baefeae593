/** Models on devices for Python's tests: node tests/models.ts [STEPS]
 *
 * An order a line, an answer a line, both in JSON. "open" opens a device with its model, which the next orders are for,
 * until "leave" closes it. Each answer has the model's version and the journal after it. With STEPS the process is
 * killed at the write of the state that comes after so many; "web" for STEPS takes browsers' engine.
 */

import { flushCompileCache } from "node:module";
import { createInterface } from "node:readline";
import { DeviceError } from "../src/core/errors.ts";
import type { Model } from "../src/core/models/model.ts";
import type { Columns, Inputs } from "../src/core/models/version.ts";
import { type Labels, policyOf } from "../src/core/permission/policy.ts";
import { Device } from "../src/core/sessions/device.ts";
import { NodePlatform, NpzExamples } from "../src/node/device.ts";

interface Order {
  readonly do:
    | "open"
    | "leave"
    | "refresh"
    | "predict"
    | "session"
    | "both"
    | "close"
    | "storm"
    | "calm"
    | "personalise"
    | "forget"
    | "swaps";
  readonly columns?: Readonly<Record<string, readonly [type: string, values: readonly (number | string)[]]>>;
  readonly calls?: number;
  readonly state?: string;
  readonly url?: string;
  readonly policy?: object;
  readonly labels?: Labels;
}

flushCompileCache(); // now, since this process is killed
const [, , steps] = process.argv;
let platform: NodePlatform;
let device: Device;
let model: Model;
let warnings: string[];
let storm: Promise<readonly number[]>;

for await (const line of createInterface({ input: process.stdin })) {
  const order = JSON.parse(line) as Order;
  const answer = order.do === "leave" ? await leave() : await answerTo(order);
  process.stdout.write(`${JSON.stringify(answer)}\n`);
}
process.exit(0);

async function open({ state = "", url = "", policy = {}, labels = {} }: Order): Promise<void> {
  platform = new NodePlatform(state, new NpzExamples(`${state}/../examples.npz`));
  if (steps === "web") {
    const { webEngine } = await import("../src/web/platform.ts");
    Object.assign(platform, { engine: webEngine });
  } else if (steps !== undefined) {
    endAfter(Number(steps));
  }
  const config = { coordinator: new URL(url), population: "phones", policy: policyOf(policy), labels, waitS: 5 };
  warnings = [];
  storm = Promise.resolve([]);
  device = new Device(platform, config, (words) => warnings.push(words));
  model = await device.model("keyboard");
}

async function leave(): Promise<object> {
  await storm;
  await model.close();
  platform.close();
  return {};
}

async function answerTo(order: Order): Promise<object> {
  const answer = await carryOut(order).catch((error: unknown) => {
    if (!(error instanceof DeviceError)) throw error;
    return { error: error.name, detail: error.message };
  });
  const journal = JSON.parse((await platform.store.get("journal")) ?? "[]") as object[];
  return { ...answer, version: model.version, personal: model.personal, journal, warnings };
}

async function carryOut(order: Order): Promise<object> {
  if (order.do === "open") await open(order);
  if (order.do === "refresh") return { swapped: await model.refresh() };
  if (order.do === "personalise") return { ...(await model.personalise()) };
  if (order.do === "forget") return { forgot: await model.forget() };
  if (order.do === "swaps") return swapping(columns(order), order.calls ?? 0);
  if (order.do === "session") return { outcome: await device.runOnce() };
  if (order.do === "both") {
    const session = device.runOnce();
    await new Promise((resolve) => setTimeout(resolve, 10));
    return model.refresh().finally(() => session) as Promise<never>;
  }
  if (order.do === "close") await model.close();
  if (order.do === "predict") return { outputs: plain(await model.predict(columns(order))) };
  if (order.do === "storm") storm = predicting(columns(order), order.calls ?? 0);
  if (order.do === "calm") return { first: await storm };
  return {};
}

/** The first value of `output` of so many calls, 50 at a time. */
async function predicting(inputs: Inputs, calls: number): Promise<readonly number[]> {
  const found: number[] = [];
  while (found.length < calls) {
    const answers = await Promise.all(Array.from({ length: 50 }, () => model.predict(inputs)));
    found.push(...answers.map(({ output }) => Number(output![0])));
    await new Promise((resolve) => setImmediate(resolve));
  }
  return found;
}

/** The different answers of so many calls, while the model becomes personal and is forgotten. */
async function swapping(inputs: Inputs, calls: number): Promise<object> {
  let isOver = false;
  const asked = predicting(inputs, calls).finally(() => {
    isOver = true;
  });
  let swaps = 0;
  for (; !isOver; swaps += 1) {
    await model.forget();
    await model.personalise();
  }
  return { answers: [...new Set(await asked)], calls: (await asked).length, swaps };
}

function columns({ columns: given = {} }: Order): Inputs {
  const made = Object.entries(given).map(([name, [type, all]]) => {
    if (type === "text") return [name, all as readonly string[]] as const;
    const values = all as readonly number[];
    if (type === "float32") return [name, Float32Array.from(values)] as const;
    if (type === "int64") return [name, BigInt64Array.from(values.map(BigInt))] as const;
    return [name, Int32Array.from(values)] as const;
  });
  return Object.fromEntries(made);
}

function plain(outputs: Columns): object {
  return Object.fromEntries(
    Object.entries(outputs).map(([name, values]) => [name, Array.from(values as never, Number)]),
  );
}

function endAfter(left: number): void {
  let rest = left;
  const owners = [platform.store, platform.blobs] as const;
  const [write, put] = [owners[0].write.bind(owners[0]), owners[1].put.bind(owners[1])];
  const count = () => {
    rest -= 1;
    if (rest < 0) process.kill(process.pid, "SIGKILL");
  };
  owners[0].write = (changes) => {
    count();
    return write(changes);
  };
  owners[1].put = (sha256, data) => {
    count();
    return put(sha256, data);
  };
}
