/** Files of a device in React Native, in the app's cache, which the system may empty: plans, and graphs by digest. */

import type { Bytes } from "../core/bytes.ts";
import { type BlobCache, usedMs } from "../core/platform.ts";
import type { FileSystem, NativeFile } from "./modules.ts";

/** A folder in the app's cache, made when something is written to it. */
export class Folder {
  readonly #system: FileSystem;
  readonly #folder: InstanceType<FileSystem["Directory"]>;

  constructor(system: FileSystem, name: string) {
    this.#system = system;
    this.#folder = new system.Directory(system.Paths.cache.uri, name);
  }

  file(name: string): NativeFile {
    return new this.#system.File(this.#folder.uri, name);
  }

  async write(name: string, data: Bytes): Promise<void> {
    this.#folder.create({ intermediates: true, idempotent: true });
    await this.file(name).write(data);
  }

  remove(name: string): void {
    const file = this.file(name);
    if (file.exists) file.delete();
  }

  /** All files. */
  list(): NativeFile[] {
    return this.#folder.exists ? this.#folder.list().filter((one): one is NativeFile => "bytes" in one) : [];
  }
}

/** Blobs by digest as files. A file that a kill left half written does not match its name, and is fetched again. */
export class FileBlobs implements BlobCache {
  readonly #folder: Folder;
  readonly #usedAt = new Map<string, number>();
  readonly #now: () => number;

  /** now: milliseconds since 1970. */
  constructor(folder: Folder, now: () => number = Date.now) {
    this.#folder = folder;
    this.#now = now;
  }

  async get(sha256: string): Promise<Bytes | null> {
    const file = this.#folder.file(sha256);
    if (!file.exists) return null;
    this.#usedAt.set(sha256, this.#now());
    return file.bytes().catch(() => null); // it is fetched
  }

  async put(sha256: string, data: Bytes): Promise<void> {
    await this.#folder.write(sha256, data);
    this.#usedAt.set(sha256, this.#now());
  }

  async trim(most: number, keep: ReadonlySet<string>): Promise<void> {
    const used = (file: NativeFile) => usedMs(this.#usedAt.get(file.name) ?? file.modificationTime ?? 0, this.#now());
    let total = 0;
    const files = this.#folder.list().filter(({ name }) => !keep.has(name));
    for (const file of files.sort((a, b) => used(b) - used(a))) {
      total += file.size;
      if (total > most) file.delete();
    }
  }
}
