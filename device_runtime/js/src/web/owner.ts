/** The settings of a device's owner in a browser, kept in its store. */

import { keptJson, type Store } from "../core/platform.ts";
import type { OwnRules } from "./conditions.ts";
import type { Retention } from "./examples.ts";

const PLACE = "owner";

/** The settings of the device's owner. policy: docs/device.md. */
export interface Owner {
  readonly policy: object;
  readonly rules: OwnRules;
  readonly retention: Retention;
}

/** The settings that are kept; null when none are. Throws StateDamaged. */
export function keptOwner(store: Store): Promise<Owner | null> {
  return keptJson<Owner>(store, PLACE);
}

/** Store settings, replacing earlier ones. Throws StateDamaged. */
export function keepOwner(store: Store, owner: Owner): Promise<void> {
  return store.write({ [PLACE]: JSON.stringify(owner) });
}
