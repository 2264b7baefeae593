/** What a check-in states of models is of its own population. */

import { expect, test } from "vitest";
import { ModelKeeper, statedVersions } from "../src/core/kept-models.ts";
import { MemoryStore } from "./memory-store.ts";

const coordinator = new URL("http://127.0.0.1:1");

test("models of a population whose name begins alike are not stated", async () => {
  const store = new MemoryStore();
  for (const [population, number] of [
    ["phones", 1],
    ["phones of testers", 2],
  ] as const) {
    const keeper = new ModelKeeper(store, coordinator, population, "keyboard");
    const signed = { text: JSON.stringify({ number }), signer: "ed25519:00", value: "00" };
    await keeper.fetch({ signed, blobs: [], trials: 0 });
    await keeper.take();
  }
  expect(await statedVersions(store, coordinator, "phones")).toEqual({ models: { keyboard: 1 } });
  expect(await statedVersions(store, coordinator, "phones of testers")).toEqual({ models: { keyboard: 2 } });
});
