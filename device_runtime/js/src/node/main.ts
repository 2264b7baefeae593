#!/usr/bin/env node
/** The command `muster-device`. */

import { ConfigError, DeviceError } from "../core/errors.ts";
import { runDevice } from "./device.ts";

try {
  const outcome = await runDevice(process.argv.slice(2));
  console.log(JSON.stringify(outcome));
  process.exit(["failed", "aborted"].includes(outcome.outcome) ? 1 : 0);
} catch (error) {
  if (!(error instanceof DeviceError)) throw error;
  console.error(error.message);
  process.exit(error instanceof ConfigError ? 2 : 1);
}
