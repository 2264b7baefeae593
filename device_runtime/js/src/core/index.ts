/** The device runtime for apps: sessions, the platform that an app hands in, the owner's policy, and errors.
 *
 * @module device
 */

export { platformRandom, useWebCrypto } from "./cryptography.ts";
export * from "./errors.ts";
export type { Outcome } from "./kept/sessions.ts";
export type { Model } from "./models/model.ts";
export type { Personalised } from "./models/personal.ts";
export type { Columns, Inputs } from "./models/version.ts";
export { type Labels, type Policy, policyOf } from "./permission/policy.ts";
export type { Engine, OnnxRuntime } from "./plans/engine.ts";
export { type Column, type ExampleSource, type Examples, ExamplesError, type Values } from "./plans/examples.ts";
export type { Attest, BlobCache, Conditions, Platform, PlatformAttestation, Store } from "./platform.ts";
export { Device } from "./sessions/device.ts";
export { runForever } from "./sessions/scheduler.ts";
export { runSession, type SessionConfig } from "./sessions/session.ts";
