/** Enrolment: a device registers with a coordinator once, and visits it with the id that it received.
 *
 * It pins the keys of secure rounds at first sight, and gets its credential from the authority. Spec: docs/spec/wire.md §9.
 */

import { type Bytes, base64, fromBase64, hex, littleEndian, utf8 } from "../bytes.ts";
import { hmac, type SigningKey, sha256 } from "../cryptography.ts";
import { DeviceError, FormatError, KeyUnavailable, SecaggRefused, TransportError } from "../errors.ts";
import { keptBlobs } from "../kept/models.ts";
import { Guard } from "../permission/guard.ts";
import { checkHttps, namedAuthority, type Place } from "../permission/policy.ts";
import type { BlobRef } from "../plans/plan.ts";
import { type Attest, IDENTITY, keptJson, type Platform } from "../platform.ts";
import { SecaggError } from "../secagg/errors.ts";
import { sign } from "../secagg/keys.ts";
import { checkCredential } from "../secagg/roster.ts";
import { currentKey, follow, type Succession } from "../wire/statements.ts";
import { deviceId, keyText, type Signer } from "./call.ts";
import { type Identity, keptOrFetched, Transport } from "./transport.ts";

/** The fraction of its validity after which a credential is renewed. */
const SPENT = 2 / 3;

/** The two private keys of a device: of its requests, and of secure aggregation. */
type DeviceKeys = Readonly<Record<"device" | "secagg", SigningKey>>;

/** A stored enrolment. Keys are in base64. known: false once the coordinator said that it knows no such device.
 *
 * parties: those of the coordinator's secure rounds, which the device pinned on first sight. shown: the authority that the
 * coordinator named last. Both are null if it has no secure rounds.
 */
interface Enrolment {
  readonly key: string;
  readonly device: string;
  readonly parties: { readonly server: string; readonly authority: string } | null;
  readonly shown: { readonly key: string; readonly url: string } | null;
  readonly known: boolean;
}

/** A stored credential, for the authority whose key signed it. Bytes are in base64. */
interface KeptCredential {
  readonly secagg: string;
  readonly authority: string;
  readonly credential: string;
  readonly renewAt: number;
}

/** The device's own keys. */
export async function deviceKeys({ signingKey }: Platform): Promise<DeviceKeys> {
  return { device: await signingKey("device"), secagg: await signingKey("secagg") };
}

/** A device's enrolment at one coordinator. */
export class Enrolments implements Identity {
  readonly keys: DeviceKeys;
  readonly #platform: Platform;
  readonly #place: Place;
  readonly #transport: Transport;
  #enrolment: Enrolment | null = null;

  private constructor(platform: Platform, place: Place, transport: Transport, keys: DeviceKeys) {
    this.#platform = platform;
    this.#place = place;
    this.#transport = transport;
    this.keys = keys;
  }

  /** The enrolment that the store holds for a coordinator, if any. Throws StateDamaged. */
  static async of(platform: Platform, place: Place, transport: Transport): Promise<Enrolments> {
    const found = new Enrolments(platform, place, transport, await deviceKeys(platform));
    found.#enrolment = await keptJson<Enrolment>(platform.store, found.#key);
    return found;
  }

  /** The id at this coordinator; empty before the first enrolment. */
  get device(): string {
    return this.#enrolment?.device ?? "";
  }

  /** The signer of requests. If this key is not enrolled, the device enrols first. Throws TransportError. */
  async signer(): Promise<Signer> {
    const known = this.#enrolment;
    const enrolled = known?.known && known.key === keyText(this.keys.device.public) ? known : await this.#enrol();
    return { keyid: enrolled.device, key: this.keys.device };
  }

  /** Note that the coordinator does not know this device, so that it enrols before the next request. */
  async forget(): Promise<void> {
    if (this.#enrolment !== null) {
      await this.#keep({ ...this.#enrolment, known: false });
    }
  }

  /** The server's current key. If it succeeds the pinned key, it is pinned from now on.
   *
   * Throws SecaggRefused when it does not; then nothing changes.
   */
  async server(shown: Succession | null): Promise<Bytes> {
    const known = this.#enrolment;
    if (known?.parties == null || shown === null) {
      throw new SecaggRefused("the coordinator names no parties of secure rounds, or does not show the server's key");
    }
    const current = await refusing(() => follow("server", shown, fromBase64(known.parties!.server)));
    if (base64(current) !== known.parties.server) {
      await this.#keep({ ...known, parties: { ...known.parties, server: base64(current) } });
    }
    return current;
  }

  /** The device's credential, with the key of the authority that signed it.
   *
   * Throws SecaggRefused when the coordinator has no secure rounds, or uses another authority than this device;
   * TransportError when a needed call to the authority fails; PolicyForbids when the policy does not allow it.
   */
  async credential(): Promise<{ authority: Bytes; credential: Bytes }> {
    await this.signer();
    let shown = this.#enrolment?.shown ?? (await this.#enrol()).shown; // it may be new
    if (shown === null) {
      throw new SecaggRefused("the coordinator names no enrolment authority, so it has no secure rounds");
    }
    let kept = await this.#credentialOf(this.#pinned, shown.url);
    // The authority's key may have a successor, of which the coordinator or the credential does not tell yet.
    for (const hearAnew of [() => this.#enrol(), () => this.refused()]) {
      if (kept.authority === shown.key) break;
      await hearAnew();
      shown = this.#enrolment?.shown ?? shown;
      kept = await this.#credentialOf(this.#pinned, shown.url);
    }
    if (kept.authority !== shown.key) {
      throw new SecaggRefused("the coordinator goes by another enrolment authority than this device does");
    }
    return { authority: fromBase64(kept.authority), credential: fromBase64(kept.credential) };
  }

  /** Note that the coordinator refused this device's advertisement, so that it requests a new credential. */
  async refused(): Promise<void> {
    await this.#platform.store.write({ [credentialPlace(this.#pinned)]: null });
  }

  /** The authority's key that this device uses: the policy's, or the first that it saw. */
  get #pinned(): Bytes {
    return namedAuthority(this.#place.policy)?.key ?? fromBase64(this.#enrolment?.parties?.authority ?? "");
  }

  get #key(): string {
    return `${IDENTITY.enrolment}${this.#place.coordinator.href}`;
  }

  async #enrol(): Promise<Enrolment> {
    const key = keyText(this.keys.device.public);
    const held = await this.#heldCredential();
    const message = async (created: number) => ({
      attestation: held ?? (await evidence(this.#platform, key, created)),
    });
    const { device, secagg } = await this.#transport.introduce(
      "enrolled",
      { keyid: key, key: this.keys.device },
      message,
    );
    const shown = secagg === null ? null : { key: base64(secagg.authority), url: secagg.authority_url };
    const seen = secagg === null ? null : { server: base64(currentKey(secagg.server)), authority: shown!.key };
    return this.#keep({ key, device, parties: this.#enrolment?.parties ?? seen, shown, known: true });
  }

  /** The credential as evidence for the coordinator, if the policy names the authority and its URL. */
  async #heldCredential(): Promise<object | null> {
    const named = namedAuthority(this.#place.policy);
    if (named === null || named.url === "") return null;
    const { secagg, credential } = await this.#credentialOf(named.key, named.url);
    return { kind: "credential", secagg, credential };
  }

  async #keep(enrolment: Enrolment): Promise<Enrolment> {
    await this.#platform.store.write({ [this.#key]: JSON.stringify(enrolment) });
    this.#enrolment = enrolment;
    return enrolment;
  }

  /** A stored credential while it is valid, renewed in the last third of its validity if the authority is reachable. */
  async #credentialOf(pinned: Bytes, shownUrl: string): Promise<KeptCredential> {
    const { store, now } = this.#platform;
    const kept = await keptJson<KeptCredential>(store, credentialPlace(pinned));
    const good = kept !== null && (await this.#isGood(kept));
    if (good && now() < kept.renewAt) return kept;
    try {
      const fresh = await this.#ask(pinned, new URL(namedAuthority(this.#place.policy)?.url || shownUrl));
      await store.write({ [credentialPlace(pinned)]: JSON.stringify(fresh) });
      return fresh;
    } catch (error) {
      if (good && error instanceof TransportError) return kept;
      throw error;
    }
  }

  async #isGood({ secagg, authority, credential }: KeptCredential): Promise<boolean> {
    const [own, now] = [this.keys.secagg.public, BigInt(Math.floor(this.#platform.now()))];
    try {
      const { device } = await checkCredential(fromBase64(authority), own, fromBase64(credential), now);
      return secagg === base64(own) && hex(device) === (await deviceId(keyText(this.keys.device.public)));
    } catch (error) {
      if (error instanceof SecaggError) return false;
      throw error;
    }
  }

  async #ask(pinned: Bytes, url: URL): Promise<KeptCredential> {
    checkHttps(this.#place.policy, "the authority", url);
    const [key, own] = [keyText(this.keys.device.public), this.keys.secagg.public];
    const about = await sha256(utf8(key));
    const message = async (created: number) => ({
      attestation: await evidence(this.#platform, key, created),
      secagg: base64(own),
      possession: base64(await sign(this.keys.secagg, "possession", about, littleEndian(created, 8))),
    });
    const authority = new Transport(this.#platform, url);
    authority.stopping = this.#transport.stopping;
    const issued = await authority.introduce("credential", { keyid: key, key: this.keys.device }, message);
    const { current, device, expires } = await refusing(async () => {
      const current = await follow("authority", issued.authority, pinned);
      return { current, ...(await checkCredential(current, own, issued.credential, 0n)) };
    });
    if (hex(device) !== (await deviceId(key))) {
      throw new SecaggRefused("the authority gave this device the credential of another");
    }
    const now = this.#platform.now();
    const renewAt = now + SPENT * Math.max(0, Number(expires) - now);
    return { secagg: base64(own), authority: base64(current), credential: base64(issued.credential), renewAt };
  }
}

const PROOF = "muster.attestation.v1";
const CHALLENGE = "muster.attestation-challenge.v1";

/** The evidence that a device has for its public key (as text), in a request that is signed at `created`.
 *
 * Throws KeyUnavailable.
 */
export async function evidence(platform: Platform, key: string, created: number): Promise<object> {
  const { attest, enrolmentSecret } = platform;
  const about = (domain: string) => utf8(`${domain}\0${key}\0${created}`);
  if (attest !== undefined) return attested(attest, await sha256(about(CHALLENGE)));
  if (enrolmentSecret === undefined) return { kind: "none" };
  return { kind: "shared-secret", proof: base64(hmac(enrolmentSecret, about(PROOF))) };
}

async function attested(attest: Attest, challenge: Bytes): Promise<object> {
  try {
    const said = await attest(challenge);
    if (said.kind === "android-key") return { kind: said.kind, chain: said.chain.map(base64) };
    return { kind: said.kind, statement: base64(said.statement) };
  } catch (error) {
    throw error instanceof DeviceError ? error : new KeyUnavailable(`this phone attests no key now: ${String(error)}`);
  }
}

function credentialPlace(authority: Bytes): string {
  return `${IDENTITY.credential}${hex(authority)}`;
}

async function refusing<T>(check: () => Promise<T>): Promise<T> {
  try {
    return await check();
  } catch (error) {
    if (error instanceof FormatError || error instanceof SecaggError) throw new SecaggRefused(error.message);
    throw error;
  }
}

/** A visit of a device to a coordinator: its calls, under the owner's limits, by the device's identity. */
export interface Visit {
  readonly platform: Platform;
  readonly place: Place;
  readonly transport: Transport;
  readonly guard: Guard;
  readonly enrolments: Enrolments;
  /** A plan, a graph or another blob that is kept between visits. */
  readonly blob: (ref: BlobRef) => Promise<Bytes>;
  /** Remove blobs beyond the policy's cache, but none that models need. */
  readonly trim: () => Promise<void>;
}

/** Begin a visit. Throws StateDamaged, and PolicyForbids when the policy demands TLS. */
export async function visit(platform: Platform, place: Place, transport: Transport): Promise<Visit> {
  const { blobs, store } = platform;
  const guard = await Guard.of(platform, place, transport.moved);
  checkHttps(place.policy, "the coordinator", place.coordinator);
  const enrolments = await Enrolments.of(platform, place, transport);
  transport.identity = enrolments;
  const blob = (ref: BlobRef) => keptOrFetched(ref, blobs, transport);
  const trim = async () => blobs.trim(place.policy.cache_bytes, await keptBlobs(store));
  return { platform, place, transport, guard, enrolments, blob, trim };
}
