/** Blocks of work whose CPU time `muster bench devices_js` asks for: a line of JSON in, a line of JSON out.
 *
 * `{"engine": null}` names the engine, `{"load": FOLDER}` loads the work in a folder, `{"train": null}` trains on it, and
 * `{"mask": {…}}` packs a vector and masks it. Times are CPU seconds of the whole process.
 */

import { createInterface } from "node:readline";
import type { Engine, OnnxRuntime } from "../core/engine.ts";
import { platformRandom, useWebCrypto } from "../core/primitives.ts";
import { execute, type Work } from "../core/runner.ts";
import { addMasks } from "../core/secagg/masking.ts";
import { pack } from "../core/secagg/packing.ts";
import { nodeFunctions } from "./crypto.ts";
import { nodeEngine } from "./engine.ts";
import { workIn } from "./work.ts";

useWebCrypto(crypto.subtle, nodeFunctions);

/** A vector of `size` zeros that is packed with that variance of noise, and how many streams mask it. */
interface Masking {
  readonly size: number;
  readonly noise: number;
  readonly streams: number;
}

let insideS = 0;

/** The engine of Node, which adds up the time that is spent inside of it. */
const measured: Engine = {
  name: nodeEngine.name,
  ort: { Tensor: nodeEngine.ort.Tensor, InferenceSession: { create } },
};

async function create(...words: Parameters<OnnxRuntime["InferenceSession"]["create"]>) {
  const session = await nodeEngine.ort.InferenceSession.create(...words);
  const run = session.run.bind(session) as (...given: unknown[]) => ReturnType<typeof session.run>;
  session.run = async (...given: unknown[]) => {
    const begin = cpuS();
    const outputs = await run(...given);
    insideS += cpuS() - begin;
    return outputs;
  };
  return session;
}

function cpuS(): number {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
}

async function train(work: Work) {
  insideS = 0;
  const begin = cpuS();
  const { steps } = await execute(work);
  const cpu_s = cpuS() - begin;
  return { cpu_s, inside_s: insideS, steps };
}

async function mask({ size, noise, streams }: Masking) {
  const encoding = { fieldBits: 26, inBits: 16, low: -(2 ** 15) / (2 ** 15 - 1), high: 1, norm: 1, weighted: false };
  const keys = Array.from({ length: streams }, (_, place) => new Uint8Array(32).fill(place));
  const masks = keys.map((key, place) => ({ key, sign: place % 2 ? -1 : 1 }) as const);
  const begin = cpuS();
  const words = await pack([{ ...encoding, size, noise }], new Float32Array(size), 1, 1, platformRandom);
  const packed = cpuS();
  await addMasks(words, masks);
  return { pack_s: packed - begin, mask_s: cpuS() - packed };
}

interface Asked {
  readonly engine?: null;
  readonly load?: string;
  readonly train?: null;
  readonly mask?: Masking;
}

let work: Work | null = null;

async function answer({ engine, load, mask: masking }: Asked): Promise<object> {
  if (engine !== undefined) return { engine: nodeEngine.name };
  if (masking !== undefined) return mask(masking);
  if (load === undefined) return train(work!);
  work = await workIn(load, measured);
  return {};
}

for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await answer(JSON.parse(line) as Asked)));
}
process.exit(0);
