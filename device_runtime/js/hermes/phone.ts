/** What an app for phones has of the package: compiled by Hermes' compiler, and not run. */

import * as core from "../src/core/index.ts";
import * as native from "../src/native/device.ts";

Object.assign(globalThis, { muster: { core, native } });
