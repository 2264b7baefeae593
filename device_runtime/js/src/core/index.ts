/** The device runtime for apps: sessions, the platform that an app hands in, the owner's policy, and errors.
 *
 * @module device
 */

export type { Conditions } from "./conditions.ts";
export { Device } from "./device.ts";
export type { Engine, OnnxRuntime } from "./engine.ts";
export * from "./errors.ts";
export { type Column, type ExampleSource, type Examples, ExamplesError, type Values } from "./examples.ts";
export type { Model } from "./model.ts";
export type { Personalised } from "./model-training.ts";
export type { Columns, Inputs } from "./model-version.ts";
export type { Outcome } from "./outcome.ts";
export { type Policy, policyOf } from "./permission/policy.ts";
export type { BlobCache, Platform, Store } from "./platform.ts";
export { platformRandom, useWebCrypto } from "./primitives.ts";
export { runForever } from "./scheduler.ts";
export { runSession, type SessionConfig } from "./session.ts";
