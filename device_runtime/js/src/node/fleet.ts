/** Many devices of a fleet in one process, each with a state folder of its own. `simulator.fleet` starts it.
 *
 * A line of JSON on standard input starts a session of one device, and a line on standard output says how it ended, as
 * with the fork server of Python's devices. Sessions run at the same time. The end of standard input ends all.
 */

import { createInterface } from "node:readline";
import { type Labels, policyOf } from "../core/permission/policy.ts";
import { runSession } from "../core/sessions/session.ts";
import { NodePlatform, NpzExamples, secretIn } from "./device.ts";

/** A session to start; Python's `simulator.fleet.fork_server.Start` has more. */
interface Start {
  readonly client: string;
  readonly coordinator: string;
  readonly population: string;
  readonly examples: string;
  readonly state: string;
  readonly wait_s: number;
  readonly policy: object | null;
  readonly device: { readonly labels: Labels };
  readonly enrolment_secret: string | null;
}

/** A device among others, none of which can tell its part of the processor's time. */
class FleetPlatform extends NodePlatform {
  override readonly workSeconds = () => 0;
}

for await (const line of createInterface({ input: process.stdin })) {
  void runDevice(JSON.parse(line) as Start);
}
process.exit(0);

async function runDevice(start: Start): Promise<void> {
  const { client, coordinator, population, policy, wait_s: waitS } = start;
  try {
    const secret = start.enrolment_secret === null ? undefined : secretIn(start.enrolment_secret);
    const platform = new FleetPlatform(start.state, new NpzExamples(start.examples), secret);
    try {
      const { labels } = start.device;
      const config = { coordinator: new URL(coordinator), population, policy: policyOf(policy ?? {}), waitS, labels };
      tell({ client, outcome: await runSession(platform, config), exit_code: 0 });
    } finally {
      platform.close();
    }
  } catch (error) {
    console.error(error);
    tell({ client, outcome: null, exit_code: 1 });
  }
}

function tell(ended: object): void {
  process.stdout.write(`${JSON.stringify(ended)}\n`);
}
