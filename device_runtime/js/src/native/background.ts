/** Sessions in the background, when the system finds it convenient: WorkManager on Android, BGProcessing on iOS.
 *
 * The system may stop the app in mid-session. Nothing has to be done then: what a session owes is in the store, and the
 * next one finishes it or gives it up.
 */

import type { Outcome } from "../core/outcome.ts";
import type { BackgroundModules } from "./modules.ts";

const TASK = "muster-session";
const LEAST_MINUTES = 15;

/** Let the system run sessions. Call it where the app starts, outside of components: the system starts the app for it. */
export function defineSessions({ tasks, background }: BackgroundModules, session: () => Promise<Outcome>): void {
  const { Success, Failed } = background.BackgroundTaskResult;
  tasks.defineTask(TASK, async () => {
    const { outcome } = await session();
    return outcome === "failed" ? Failed : Success;
  });
}

/** Ask for sessions no more often than every so many minutes, 15 at least. The person's consent comes first. */
export async function allowSessions({ background }: BackgroundModules, minutes = LEAST_MINUTES): Promise<void> {
  await background.registerTaskAsync(TASK, { minimumInterval: Math.max(minutes, LEAST_MINUTES) });
}

/** Ask for no more sessions. */
export async function forbidSessions({ tasks, background }: BackgroundModules): Promise<void> {
  if (await tasks.isTaskRegisteredAsync(TASK)) await background.unregisterTaskAsync(TASK);
}
