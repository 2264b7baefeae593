/** Enrolment keeps to the owner's policy: it asks no authority that has no TLS, where that is demanded. */

import { expect, test } from "vitest";
import { base64 } from "../src/core/bytes.ts";
import { platformRandom } from "../src/core/cryptography.ts";
import { PolicyForbids } from "../src/core/errors.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import { keptSigningKey, type Platform } from "../src/core/platform.ts";
import { keyText } from "../src/core/protocol/call.ts";
import { deviceKeys, Enrolments } from "../src/core/protocol/enrolment.ts";
import { Transport } from "../src/core/protocol/transport.ts";
import { MemoryStore } from "./memory-store.ts";

test("an authority without TLS is not asked where the policy demands TLS", async () => {
  const asked: string[] = [];
  const refuse = async (url: URL) => {
    asked.push(url.href);
    throw new Error("no network");
  };
  const store = new MemoryStore();
  const given = { store, random: platformRandom, now: () => 1, fetch: refuse };
  const platform = { ...given, signingKey: (name: string) => keptSigningKey(store, name) } as unknown as Platform;
  const coordinator = new URL("https://fl.example");
  const [key, authority] = [keyText((await deviceKeys(platform)).device.public), base64(new Uint8Array(32))];
  const shown = { key: authority, url: "http://authority.example" };
  const enrolment = { key, device: "d-0", known: true, parties: { server: authority, authority }, shown };
  await store.write({ [`enrolment:${coordinator.href}`]: JSON.stringify(enrolment) });
  const place = { coordinator, population: "p", policy: policyOf({ require_https: true }) };
  const transport = new Transport(platform, coordinator);
  const enrolments = await Enrolments.of(platform, place, transport);
  await expect(enrolments.credential()).rejects.toThrow(PolicyForbids);
  expect(asked).toEqual([]);
});
