/** The worker of a device in a browser: it runs sessions until it is terminated, and tells the page how each ended. */

import type { Conditions } from "../core/conditions.ts";
import { DeviceError } from "../core/errors.ts";
import { policyOf } from "../core/permission/policy.ts";
import { runForever } from "../core/scheduler.ts";
import { openDatabase } from "./database.ts";
import type { Ending, Start, ToWorker } from "./device.ts";
import { alone, webPlatform } from "./platform.ts";

const WAIT_S = 30;

let conditions: Conditions;

self.onmessage = ({ data }: MessageEvent<ToWorker>) => {
  conditions = data.conditions;
  if ("coordinator" in data) void run(data);
};

async function run({ coordinator, population, owner }: Start): Promise<void> {
  try {
    const platform = webPlatform(await openDatabase(), owner.retention, owner.rules, () => conditions);
    const policy = policyOf(owner.policy);
    const config = { coordinator: new URL(coordinator), population, policy, waitS: WAIT_S };
    await alone(() => runForever(platform, config, (outcome) => tell({ outcome }), new AbortController().signal));
  } catch (error) {
    const reason = error instanceof DeviceError ? error.reason : "runtime-failed";
    tell({ stopped: { reason, detail: error instanceof Error ? error.message : String(error) } });
  }
}

function tell(ending: Ending): void {
  self.postMessage(ending);
}
