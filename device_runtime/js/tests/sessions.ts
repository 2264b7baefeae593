/** Commands of devices on Node, one after the other: a line of words in, a line with the outcome out, both in JSON. */

import { createInterface } from "node:readline";
import { main } from "../src/node/command.ts";

for await (const words of createInterface({ input: process.stdin })) {
  await main(JSON.parse(words) as string[]);
}
process.exit(0); // connections that are kept would keep the process
