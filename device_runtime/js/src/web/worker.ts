/** The worker of a device in a browser: it runs sessions until it is terminated, and tells the page how each ended.
 *
 * Another one, of the same script, has a model.
 *
 * @module web/worker
 */

import type { Conditions } from "../core/conditions.ts";
import { Device } from "../core/device.ts";
import { StateDamaged } from "../core/errors.ts";
import type { Outcome } from "../core/outcome.ts";
import { policyOf } from "../core/permission/policy.ts";
import { openDatabase } from "./database.ts";
import type { Start, ToWorker } from "./device.ts";
import { type Ending, stoppedBy } from "./endings.ts";
import { answer, type Question } from "./model-worker.ts";
import { keptOwner } from "./owner.ts";
import { alone } from "./pages.ts";
import { webPlatform } from "./platform.ts";
import { IndexedDbStore } from "./store.ts";

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
    const owner = await keptOwner(new IndexedDbStore(database));
    if (owner === null) throw new StateDamaged("no settings are kept: another page deleted them");
    const platform = webPlatform(database, owner.retention, owner.rules, () => conditions);
    const config = { coordinator: new URL(coordinator), population, policy: policyOf(owner.policy), waitS: WAIT_S };
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
