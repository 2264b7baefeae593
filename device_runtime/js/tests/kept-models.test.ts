/** What a device keeps of the models of its apps, and what it states of them. */

import { expect, test } from "vitest";
import { ModelKeeper, statedVersions } from "../src/core/kept/models.ts";
import { MemoryStore } from "./memory-store.ts";

const coordinator = new URL("http://127.0.0.1:1");

function version(number: number) {
  return { signed: { text: JSON.stringify({ number }), signer: "ed25519:a", value: "b" }, blobs: [] };
}

test("trials are counted for each version, whatever becomes of the others", async () => {
  const keeper = new ModelKeeper(new MemoryStore(), { coordinator, population: "phones" }, "keyboard");
  await keeper.count("a", 1);
  await keeper.fetch(version(2));
  await keeper.count("b", 1);
  await keeper.refuse({ signed: version(1).signed, engine: "onnxruntime-node", why: "it is bad", final: true });
  await keeper.fetch(version(3));
  await keeper.take();
  expect([await keeper.trials("a"), await keeper.trials("b"), await keeper.trials("c")]).toEqual([1, 1, 0]);
  await keeper.count("a", 0);
  for (let other = 0; other < 16; other++) await keeper.count(`${other}`, 1);
  expect([await keeper.trials("a"), await keeper.trials("b"), await keeper.trials("0")]).toEqual([0, 0, 1]);
});

test("a population states its own models alone, whatever others are called", async () => {
  const store = new MemoryStore();
  for (const [population, number] of [
    ["phones", 1],
    ["phones of friends", 2],
  ] as const) {
    const keeper = new ModelKeeper(store, { coordinator, population }, "keyboard");
    await keeper.fetch(version(number));
    await keeper.take();
    const { signed } = version(number + 2);
    await keeper.refuse({ signed, engine: "onnxruntime-node", why: "it is bad", final: true });
  }
  const stated = { models: { keyboard: 1 }, refused: { keyboard: 3 } };
  expect(await statedVersions(store, { coordinator, population: "phones" })).toEqual(stated);
  expect(await statedVersions(store, { coordinator, population: "phones of" })).toEqual({});
});
