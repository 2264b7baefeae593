/** The states of a session at a device, from its input to M7. Spec: docs/spec/secagg.md §6. */

import type { Bytes } from "../bytes.ts";
import type { PairKey } from "../primitives.ts";
import type { Float32 } from "../report.ts";
import type { Peer } from "./client-state.ts";
import type { HeldModel, Invite } from "./invite.ts";
import type { Advertisement, Roster } from "./roster.ts";

/** The input of a device to a session.
 *
 * vector: float32 (D,). weight: an integer, 0 … w_max. lastRound: the greatest round of the task that the device ever
 * answered for. now: the device's time, in seconds since 1970; 0 if its clock cannot be trusted.
 */
export interface SessionInput extends HeldModel {
  readonly vector: Float32;
  readonly weight: number;
  readonly credential: Bytes;
  readonly lastRound: bigint;
  readonly now: bigint;
}

/** The state between M1 and M2. */
export interface Advertised {
  readonly given: SessionInput;
  readonly invite: Invite;
  readonly maskSecret: Bytes;
  readonly maskKey: PairKey;
  readonly boxKey: PairKey;
  readonly device: Advertisement;
}

/** The state between M3 and M4. Secrets are by the position of a neighbour. */
export interface Shared {
  readonly given: SessionInput;
  readonly invite: Invite;
  readonly roster: Roster;
  readonly sid: Bytes;
  readonly seed: bigint;
  readonly maskSecrets: ReadonlyMap<number, Bytes>;
  readonly boxSecrets: ReadonlyMap<number, Bytes>;
}

/** The state between M5 and M6. delivered: U0. peers: the neighbours in it whose boxes opened, with their shares. */
export interface Opened {
  readonly before: Shared;
  readonly delivered: ReadonlySet<number>;
  readonly peers: readonly Peer[];
  readonly accused: ReadonlySet<number>;
}
