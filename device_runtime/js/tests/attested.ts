/** A session of a phone, on doubles of React Native's modules: node tests/attested.ts COORDINATOR SYSTEM VOUCHER FOLDER
 *
 * What the phone's hardware would attest for a challenge is at VOUCHER. The outcome is printed as JSON.
 */

import { platformRandom } from "../src/core/cryptography.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import type { ExampleSource } from "../src/core/plans/examples.ts";
import { runSession } from "../src/core/sessions/session.ts";
import { type AppIntegrity, appIntegrity, phonePlatform } from "../src/native/device.ts";
import { FakeDatabase, FakeSecureStore, fakeFiles, fakeOrt } from "./phone.ts";

const [coordinator, system, voucher, folder] = process.argv.slice(2) as [string, string, string, string];
const asked = new Map<string, string>();
const vouched = async (challenge: string) => (await (await fetch(`${voucher}/${challenge}`)).json()) as string[];

const integrity: AppIntegrity = {
  async generateHardwareAttestedKeyAsync(name, challenge) {
    asked.set(name, challenge);
  },
  getAttestationCertificateChainAsync: async (name) => vouched(asked.get(name)!),
  generateKeyAsync: async () => "k",
  attestKeyAsync: async (_, challenge) => (await vouched(challenge))[0]!,
};

const platform = await phonePlatform({
  ort: fakeOrt,
  ortVersion: "1.24.3",
  database: new FakeDatabase(),
  secureStore: new FakeSecureStore(),
  battery: { getPowerStateAsync: async () => ({ batteryLevel: 1, batteryState: 2, lowPowerMode: false }) },
  network: { fetch: async () => ({ details: null }) },
  files: fakeFiles(folder),
  fetch,
  random: platformRandom,
  examples: { counts: async () => new Map() } as unknown as ExampleSource,
  attest: appIntegrity(integrity, system),
});
const place = { coordinator: new URL(coordinator), population: "phones", policy: policyOf({}) };
console.log(JSON.stringify(await runSession(platform, { ...place, waitS: 1 })));
process.exit(0); // connections that are kept would keep the process
