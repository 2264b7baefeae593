#!/usr/bin/env node
/** The program `muster-device`. */

import { main } from "./command.ts";

process.exit(await main(process.argv.slice(2))); // connections that are kept would keep the process
