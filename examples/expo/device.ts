/** The device of this app: React Native's modules, handed to `@muster-fl/device`. */

import * as AppIntegrity from "@expo/app-integrity";
import { platformRandom, policyOf, runSession, useWebCrypto } from "@muster-fl/device";
import { appIntegrity, phonePlatform } from "@muster-fl/device/native";
import NetInfo from "@react-native-community/netinfo";
import * as BackgroundTask from "expo-background-task";
import * as Battery from "expo-battery";
import { Directory, File, Paths } from "expo-file-system";
import { fetch } from "expo/fetch";
import * as SecureStore from "expo-secure-store";
import { openDatabaseAsync } from "expo-sqlite";
import * as TaskManager from "expo-task-manager";
import * as ort from "onnxruntime-react-native";
import { Platform } from "react-native";
import QuickCrypto, { install } from "react-native-quick-crypto";
import { DigitExamples } from "./examples";

const COORDINATOR = new URL("https://coordinator.example");
const POPULATION = "digits";
// What the owner of the phone allows. docs/device.md has all settings.
const POLICY = policyOf({ require_https: true, populations: [POPULATION], per_day: { compute_seconds: 600 } });

install(); // crypto.getRandomValues
useWebCrypto(QuickCrypto.subtle as unknown as SubtleCrypto);

export const background = { tasks: TaskManager, background: BackgroundTask };
export const database = openDatabaseAsync("muster.db");
export const examples = new DigitExamples(database);

/** One session with the coordinator. It never throws for what a coordinator or a network does: the outcome says it. */
export async function session() {
  const platform = await phonePlatform({
    ort,
    ortVersion: "1.24.3",
    database: await database,
    secureStore: SecureStore,
    battery: Battery,
    network: NetInfo,
    files: { Directory, File, Paths },
    fetch: fetch as unknown as typeof globalThis.fetch,
    random: platformRandom,
    examples,
    attest: appIntegrity(AppIntegrity, Platform.OS),
  });
  return runSession(platform, { coordinator: COORDINATOR, population: POPULATION, policy: POLICY, waitS: 60 });
}
