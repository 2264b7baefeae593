/** What a device keeps of the models of its apps, and what it states of them. */

import { expect, test } from "vitest";
import { ModelKeeper, statedVersions } from "../src/core/kept-models.ts";
import { MemoryStore } from "./memory-store.ts";

const coordinator = new URL("http://127.0.0.1:1");

function version(number: number) {
  return { signed: { text: JSON.stringify({ number }), signer: "ed25519:a", value: "b" }, blobs: [], trials: 0 };
}

test("a population states its own models alone, whatever others are called", async () => {
  const store = new MemoryStore();
  for (const [population, number] of [
    ["phones", 1],
    ["phones of friends", 2],
  ] as const) {
    const keeper = new ModelKeeper(store, coordinator, population, "keyboard");
    await keeper.fetch(version(number));
    await keeper.take();
    const { signed } = version(number + 2);
    await keeper.refuse({ signed, engine: "onnxruntime-node", why: "it is bad", final: true });
  }
  const stated = { models: { keyboard: 1 }, refused: { keyboard: 3 } };
  expect(await statedVersions(store, coordinator, "phones")).toEqual(stated);
  expect(await statedVersions(store, coordinator, "phones of")).toEqual({});
});
