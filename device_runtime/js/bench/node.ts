/** Blocks of work on Node: a line of JSON in, a line of JSON out. Paths of work are folders. */

import { createInterface } from "node:readline";
import { useWebCrypto } from "../src/core/cryptography.ts";
import { nodeEngine, nodeFunctions } from "../src/node/engine.ts";
import { type Asked, Blocks } from "./blocks.ts";
import { filesIn } from "./folder.ts";

useWebCrypto(crypto.subtle, nodeFunctions);

function cpuMs(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1000;
}

const blocks = new Blocks(nodeEngine, filesIn, cpuMs);
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await blocks.answer(JSON.parse(line) as Asked)));
}
process.exit(0);
