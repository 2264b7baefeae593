/** Modules of React Native that an app hands in: the parts of their published interfaces that a device uses.
 *
 * Each is satisfied by the package that it names, which `examples/expo` checks by the package's own types. None is
 * imported here, so that the package installs without them.
 */

import type { InferenceSession } from "onnxruntime-common";
import type { OnnxRuntime } from "../core/plans/engine.ts";

/** onnxruntime-react-native: a session reads its graph from a file. */
export interface NativeOrt {
  readonly InferenceSession: {
    /** A session that runs the graph in a file. */
    create(path: string): Promise<InferenceSession>;
  };
  readonly Tensor: OnnxRuntime["Tensor"];
}

/** Statements of expo-sqlite, inside a transaction or outside. */
export interface Statements {
  /** Run statements without parameters. */
  execAsync(source: string): Promise<void>;
  /** Run a statement with these parameters. */
  runAsync(source: string, params: string[]): Promise<unknown>;
  /** The first row of a query; null when there is none. */
  getFirstAsync<T>(source: string, params: string[]): Promise<T | null>;
}

/** A database of expo-sqlite. */
export interface Database extends Statements {
  /** Run a task inside a transaction of its own. */
  withExclusiveTransactionAsync(task: (transaction: Statements) => Promise<void>): Promise<void>;
}

/** expo-secure-store: short texts in the Keychain, or under a key of the Android Keystore. */
export interface SecureStore {
  readonly AFTER_FIRST_UNLOCK_THIS_DEVICE_ONLY: number;
  /** The text under a key; null when there is none. */
  getItemAsync(key: string, options?: { keychainAccessible?: number }): Promise<string | null>;
  /** Keep a text under a key. */
  setItemAsync(key: string, value: string, options?: { keychainAccessible?: number }): Promise<void>;
}

/** expo-battery. */
export interface BatteryModule {
  /** The charge as a fraction, the state as a number of the module's, and whether the phone saves power. */
  getPowerStateAsync(): Promise<{ batteryLevel: number; batteryState: number; lowPowerMode: boolean }>;
}

/** @react-native-community/netinfo. */
export interface NetInfo {
  /** The connection now. */
  fetch(): Promise<{ details: object | null }>;
}

/** @expo/app-integrity. Challenges are texts; certificates and statements are in base64. */
export interface AppIntegrity {
  /** On Android: make a key of this name, attested for a challenge. */
  generateHardwareAttestedKeyAsync(name: string, challenge: string): Promise<void>;
  /** On Android: the chain of a key, its own certificate first. */
  getAttestationCertificateChainAsync(name: string): Promise<string[]>;
  /** On iOS: the id of a new key. */
  generateKeyAsync(): Promise<string>;
  /** On iOS: Apple's statement about a key, for a challenge. */
  attestKeyAsync(key: string, challenge: string): Promise<string>;
}

/** A file of expo-file-system. Times are in milliseconds since 1970. */
export interface NativeFile {
  readonly uri: string;
  readonly name: string;
  readonly exists: boolean;
  readonly size: number;
  readonly modificationTime: number | null;
  /** The content. */
  bytes(): Promise<Uint8Array<ArrayBuffer>>;
  /** Replace the content. */
  write(content: Uint8Array): Promise<void> | void;
  /** Remove the file. */
  delete(): void;
}

/** expo-file-system: files by folder and name. */
export interface FileSystem {
  readonly File: new (folder: string, name: string) => NativeFile;
  readonly Directory: new (
    parent: string,
    name: string,
  ) => {
    readonly uri: string;
    readonly exists: boolean;
    /** Make the folder. */
    create(options: { intermediates: boolean; idempotent: boolean }): void;
    /** Files and folders in it. */
    list(): readonly object[];
  };
  readonly Paths: { readonly cache: { readonly uri: string }; readonly availableDiskSpace: number };
}

/** expo-task-manager and expo-background-task: work while the app is not in front. */
export interface BackgroundModules {
  readonly tasks: {
    /** Say what a task does, once per start of the app. */
    defineTask(name: string, work: () => Promise<number>): void;
    /** Whether the system will run a task. */
    isTaskRegisteredAsync(name: string): Promise<boolean>;
  };
  readonly background: {
    readonly BackgroundTaskResult: { readonly Success: number; readonly Failed: number };
    /** Have the system run a task. minimumInterval: in minutes. */
    registerTaskAsync(name: string, options: { minimumInterval: number }): Promise<void>;
    /** Have the system run a task no more. */
    unregisterTaskAsync(name: string): Promise<void>;
  };
}
