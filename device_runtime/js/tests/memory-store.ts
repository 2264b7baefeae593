/** A store in memory, for tests of what the core keeps. */

import type { Store } from "../src/core/platform.ts";

export class MemoryStore implements Store {
  readonly #kept = new Map<string, string>();

  async get(key: string): Promise<string | null> {
    return this.#kept.get(key) ?? null;
  }

  async write(changes: Readonly<Record<string, string | null>>): Promise<void> {
    for (const [key, value] of Object.entries(changes)) {
      value === null ? this.#kept.delete(key) : this.#kept.set(key, value);
    }
  }
}
