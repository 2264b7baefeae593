/** The platform of a device on Node: its state in a folder, and this machine's clock, network and engine.
 *
 * @module node
 */

import { readFileSync } from "node:fs";
import { totalmem } from "node:os";
import { setTimeout as sleepMs } from "node:timers/promises";
import type { Bytes } from "../core/bytes.ts";
import { platformRandom, useWebCrypto } from "../core/cryptography.ts";
import { ConfigError } from "../core/errors.ts";
import type { ExampleSource } from "../core/plans/examples.ts";
import { type Attest, keptSigningKey, type Platform, UNKNOWN } from "../core/platform.ts";
import { nodeEngine, nodeFunctions } from "./engine.ts";
import { FileBlobs, SqliteStore } from "./store.ts";

export { NpzExamples } from "./npz.ts";

useWebCrypto(crypto.subtle, nodeFunctions);

/** An enrolment secret from its file, without the white space around it. Throws ConfigError where it cannot be read, or is empty. */
export function secretIn(file: string): Bytes {
  let text: string;
  try {
    text = readFileSync(file, "latin1").replace(/^[ \t\n\r\v\f]+|[ \t\n\r\v\f]+$/g, "");
  } catch (error) {
    throw new ConfigError(`the enrolment secret ${file} cannot be read: ${(error as Error).message}`);
  }
  if (text === "") throw new ConfigError(`the enrolment secret ${file} is empty`);
  return Uint8Array.from(text, (character) => character.charCodeAt(0));
}

/** A platform for sessions. Nobody else can use its folder until it is closed. */
export class NodePlatform implements Platform {
  readonly store: SqliteStore;
  readonly blobs: FileBlobs;
  readonly examples: ExampleSource;
  readonly enrolmentSecret: Bytes | undefined;
  /** An application's own evidence, instead of a secret. */
  attest: Attest | undefined;
  readonly engine = nodeEngine;
  readonly signingKey = (name: "device" | "secagg") => keptSigningKey(this.store, name);
  readonly conditions = async () => UNKNOWN;
  readonly fetch = fetch;
  readonly random = platformRandom;
  readonly now = () => Date.now() / 1000;
  readonly workSeconds: () => number = () => {
    const { user, system } = process.cpuUsage();
    return (user + system) / 1e6;
  };
  readonly sleep = (seconds: number) => sleepMs(1000 * seconds);
  readonly memoryBytes = totalmem();

  /** Opens the state in a folder, which is made where there is none. Throws StateInUse or StateDamaged. */
  constructor(state: string, examples: ExampleSource, enrolmentSecret?: Bytes) {
    this.store = new SqliteStore(state);
    this.blobs = new FileBlobs(state);
    this.examples = examples;
    this.enrolmentSecret = enrolmentSecret;
  }

  /** Close the state, so that another process can use the folder. */
  close(): void {
    this.store.close();
  }
}
