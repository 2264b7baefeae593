/** The worker of a device in a browser: it runs sessions until it is terminated, and tells the page how each ended.
 *
 * Another one, of the same script, has a model: it answers questions, and opens the model with the first.
 *
 * @module web/worker
 */

import { DeviceError, StateDamaged } from "../core/errors.ts";
import type { Outcome } from "../core/kept/sessions.ts";
import { Model } from "../core/models/model.ts";
import { policyOf } from "../core/permission/policy.ts";
import { type Conditions, UNKNOWN } from "../core/platform.ts";
import { Device } from "../core/sessions/device.ts";
import type { Start, ToWorker } from "./device.ts";
import type { Answer, Question } from "./model.ts";
import { alone, type Ending, stoppedBy } from "./pages.ts";
import { webPlatform } from "./platform.ts";
import { IndexedDbStore, keptLabels, keptOwner, openDatabase } from "./storage.ts";

const WAIT_S = 30;

let conditions: Conditions;

self.onmessage = ({ data }: MessageEvent<ToWorker | Question>) => {
  if ("model" in data) return void answer(data);
  conditions = data.conditions;
  if ("coordinator" in data) void run(data);
};

// A rejected promise that no caller awaits is a crash like any other: the page is told.
self.onunhandledrejection = ({ reason }) => {
  throw reason;
};

async function run(start: Start): Promise<void> {
  try {
    await alone(start, () => sessions(start));
  } catch (error) {
    tell(stoppedBy(error));
  }
}

async function sessions(start: Start): Promise<void> {
  const { coordinator, population, once, models = [] } = start;
  const database = await openDatabase(start);
  try {
    const store = new IndexedDbStore(database);
    const [owner, labels] = [await keptOwner(store), await keptLabels(store)];
    if (owner === null) throw new StateDamaged("no settings are kept: another page deleted them");
    const platform = await webPlatform(database, owner, () => conditions);
    const policy = policyOf(owner.policy);
    const config = { coordinator: new URL(coordinator), population, policy, waitS: WAIT_S, labels };
    const stop = new AbortController();
    const ended = (outcome: Outcome) => {
      if (once) stop.abort();
      tell({ outcome });
    };
    const device = new Device(platform, config);
    for (const name of models) await device.model(name);
    await device.runForever(ended, stop.signal);
  } finally {
    database.close();
  }
}

function tell(ending: Ending): void {
  self.postMessage(ending);
}

let model: Promise<Model> | undefined;

/** Answer a question. What is no error of a device is a crash. */
export async function answer(question: Question): Promise<void> {
  const { id, rows } = question;
  let said: Answer;
  try {
    model ??= open(question).catch((error: unknown) => {
      model = undefined; // the next question tries again
      throw error;
    });
    const opened = await model;
    await opened.reload(console.warn); // the worker of sessions may have taken another version
    said = rows === null ? { id, swapped: await opened.refresh() } : { id, outputs: await opened.predict(rows) };
  } catch (error) {
    if (!(error instanceof DeviceError)) throw error;
    said = { id, ...stoppedBy(error).stopped };
  }
  self.postMessage(said);
}

async function open(question: Question): Promise<Model> {
  const { coordinator, population, owner } = question;
  const platform = await webPlatform(await openDatabase(question), owner, () => UNKNOWN);
  const place = { coordinator: new URL(coordinator), population, policy: policyOf(owner.policy) };
  return Model.open(platform, place, question.model, (work) => alone(question, work), console.warn);
}
