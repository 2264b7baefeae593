/** Doubles of React Native's modules: real SQLite and ONNX Runtime behind the interfaces, and the native side's faults. */

import { existsSync, mkdirSync, readdirSync, readFileSync, rmSync, statSync, writeFileSync } from "node:fs";
import { basename, join } from "node:path";
import { DatabaseSync } from "node:sqlite";
import * as ort from "onnxruntime-node";
import type {
  BackgroundModules,
  Database,
  FileSystem,
  NativeOrt,
  SecureStore,
  Statements,
} from "../src/native/modules.ts";

/** expo-sqlite on Node's SQLite. */
export class FakeDatabase implements Database {
  readonly sqlite = new DatabaseSync(":memory:");

  async execAsync(source: string): Promise<void> {
    this.sqlite.exec(source);
  }

  async runAsync(source: string, params: string[]): Promise<unknown> {
    return this.sqlite.prepare(source).run(...params);
  }

  async getFirstAsync<T>(source: string, params: string[]): Promise<T | null> {
    return (this.sqlite.prepare(source).get(...params) as T | undefined) ?? null;
  }

  async withExclusiveTransactionAsync(task: (transaction: Statements) => Promise<void>): Promise<void> {
    this.sqlite.exec("BEGIN EXCLUSIVE");
    try {
      await task(this);
      this.sqlite.exec("COMMIT");
    } catch (error) {
      this.sqlite.exec("ROLLBACK");
      throw error;
    }
  }
}

/** expo-secure-store in memory. */
export class FakeSecureStore implements SecureStore {
  readonly AFTER_FIRST_UNLOCK_THIS_DEVICE_ONLY = 1;
  readonly kept = new Map<string, string>();

  async getItemAsync(key: string): Promise<string | null> {
    return this.kept.get(key) ?? null;
  }

  async setItemAsync(key: string, value: string): Promise<void> {
    this.kept.set(key, value);
  }
}

/** expo-file-system in a folder of this machine. */
export function fakeFiles(cache: string): FileSystem {
  class File {
    readonly uri: string;

    constructor(folder: string, name: string) {
      this.uri = `file://${join(folder.replace("file://", ""), name)}`;
    }
    get path() {
      return this.uri.replace("file://", "");
    }
    get name() {
      return basename(this.path);
    }
    get exists() {
      return existsSync(this.path);
    }
    get size() {
      return statSync(this.path).size;
    }
    get modificationTime() {
      return statSync(this.path).mtimeMs;
    }
    async bytes() {
      return Uint8Array.from(readFileSync(this.path));
    }
    async write(content: Uint8Array) {
      writeFileSync(this.path, content);
    }
    delete() {
      rmSync(this.path);
    }
  }

  class Directory {
    readonly uri: string;

    constructor(parent: string, name: string) {
      this.uri = `${parent}/${name}`;
    }
    get path() {
      return this.uri.replace("file://", "");
    }
    get exists() {
      return existsSync(this.path);
    }
    create() {
      mkdirSync(this.path, { recursive: true });
    }
    list() {
      return readdirSync(this.path).map((name) => new File(this.uri, name));
    }
  }
  return { File, Directory, Paths: { cache: { uri: `file://${cache}` }, availableDiskSpace: 5e9 } };
}

const Base = ort.Tensor as unknown as new (type: string, data: unknown, dims: readonly number[]) => ort.Tensor;

/** onnxruntime-react-native as its native side is: graphs from paths alone, whole buffers, and strings for errors. */
export const fakeOrt: NativeOrt = {
  Tensor: class extends Base {
    constructor(type: string, data: Float32Array<ArrayBuffer>, dims: readonly number[]) {
      const kind = data.constructor as new (buffer: ArrayBuffer, at: number, length: number) => Float32Array;
      super(type, new kind(data.buffer, 0, data.length), dims); // the view's offset is lost
    }
  } as unknown as NativeOrt["Tensor"],
  InferenceSession: {
    async create(path: string, ...options: unknown[]) {
      if (options.length > 0) throw new Error("the native side reads options as an offset");
      const session = await ort.InferenceSession.create(path.replace("file://", "")).catch((error: unknown) => {
        throw String(error);
      });
      const run = (...words: Parameters<typeof session.run>) =>
        session.run(...words).catch((error: unknown) => {
          throw String(error);
        });
      const { inputNames, outputNames } = session;
      return { inputNames, outputNames, run, release: () => session.release() } as unknown as ort.InferenceSession;
    },
  },
};

/** expo-task-manager and expo-background-task, which run nothing by themselves. */
export class FakeBackground implements BackgroundModules {
  readonly defined = new Map<string, () => Promise<number>>();
  readonly registered = new Map<string, number>();
  readonly tasks = {
    defineTask: (name: string, work: () => Promise<number>) => {
      this.defined.set(name, work);
    },
    isTaskRegisteredAsync: async (name: string) => this.registered.has(name),
  };
  readonly background = {
    BackgroundTaskResult: { Success: 1, Failed: 2 },
    registerTaskAsync: async (name: string, { minimumInterval }: { minimumInterval: number }) => {
      this.registered.set(name, minimumInterval);
    },
    unregisterTaskAsync: async (name: string) => {
      this.registered.delete(name);
    },
  };
}
