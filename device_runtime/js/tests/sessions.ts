/** Sessions of devices on Node, one after the other: a line of words in, a line with the outcome out, both in JSON. */

import { createInterface } from "node:readline";
import { runDevice } from "../src/node/device.ts";

for await (const words of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await runDevice(JSON.parse(words) as string[])));
}
process.exit(0); // connections that are kept would keep the process
