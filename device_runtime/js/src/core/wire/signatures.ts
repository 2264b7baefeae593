/** Signed requests: the profile of RFC 9421 by which a device proves its identity. Spec: docs/spec/wire.md §10. */

import { type Bytes, base64, base64url, hex, utf8 } from "../bytes.ts";
import { type RandomSource, type SigningKey, sha256 } from "../primitives.ts";

const COVERED = ["@method", "@authority", "@path", "@query"];
const SIGNED_FIELDS = ["content-digest", "upload-offset", "upload-length", "upload-complete", "repr-digest"];
const VALIDITY_S = 300;
const NONCE_BYTES = 16;
const ID_HEX = 32;

/** The parts of a request that a signature can cover. Names of header fields are in lower case. */
interface SignableRequest {
  readonly method: string;
  readonly url: URL;
  readonly fields: Readonly<Record<string, string>>;
}

/** The signer of requests: a private key, and the name by which the coordinator finds the public one. */
export interface Signer {
  readonly keyid: string;
  readonly key: SigningKey;
}

/** The two header fields that sign a request, made at `created`, in seconds since 1970. */
export async function signatureFields(
  { keyid, key }: Signer,
  request: SignableRequest,
  created: number,
  random: RandomSource,
): Promise<Record<"signature-input" | "signature", string>> {
  const covered = [...COVERED, ...SIGNED_FIELDS.filter((name) => name in request.fields)];
  const nonce = base64url(random(NONCE_BYTES));
  const times = `created=${created};expires=${created + VALIDITY_S}`;
  const parameters = `(${covered.map((name) => `"${name}"`).join(" ")});${times};nonce="${nonce}";keyid="${keyid}"`;
  const signature = await key.sign(signatureBase(request, covered, parameters));
  return { "signature-input": `device=${parameters}`, signature: `device=:${base64(signature)}:` };
}

/** The text that is signed (RFC 9421 §2.5): a line for each component, and one for the parameters. */
export function signatureBase(request: SignableRequest, covered: readonly string[], parameters: string): Bytes {
  const { host, pathname, search } = request.url;
  const derived: Record<string, string> = {
    "@method": request.method,
    "@authority": host.toLowerCase(),
    "@path": pathname,
    "@query": search || "?",
  };
  const lines = covered.map((name) => `"${name}": ${derived[name] ?? request.fields[name]}`);
  return utf8([...lines, `"@signature-params": ${parameters}`].join("\n"));
}

/** A digest of 32 bytes as Content-Digest and Repr-Digest say it (RFC 9530). */
export function digestField(digest: Bytes): string {
  return `sha-256=:${base64(digest)}:`;
}

/** A device's public key in its text form. */
export function keyText(publicKey: Bytes): string {
  return `ed25519:${base64url(publicKey)}`;
}

/** The id of the device with this public key (as text); it depends on nothing else. */
export async function deviceId(key: string): Promise<string> {
  return hex(await sha256(utf8(key))).slice(0, ID_HEX);
}
