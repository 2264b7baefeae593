/** The platform of a device in a browser, inside a worker: one page at a time, with the state of the page's origin.
 *
 * The engine is onnxruntime-web as WebAssembly with SIMD, on the one thread of the worker. Loading a graph can take longer
 * than running it, so sessions stay loaded between rounds, up to a size. Their memory comes back when the worker ends.
 */

import * as ort from "onnxruntime-web/wasm";
import { type Bytes, hex } from "../core/bytes.ts";
import { platformRandom, type SigningKey, sha256 } from "../core/cryptography.ts";
import { StateDamaged } from "../core/errors.ts";
import type { Engine, OnnxRuntime } from "../core/plans/engine.ts";
import type { Conditions, Platform } from "../core/platform.ts";
import { allowed } from "./conditions.ts";
import { LocalExamples } from "./examples.ts";
import { CachedBlobs, change, IndexedDbStore, keptSecret, look, type Owner } from "./storage.ts";

const GIB = 1 << 30;

/** A platform with the state in a database. conditions: those that the page read last. Throws StateDamaged. */
export async function webPlatform(
  database: IDBDatabase,
  { retention, rules }: Owner,
  conditions: () => Conditions,
): Promise<Platform> {
  const store = new IndexedDbStore(database);
  return {
    store,
    enrolmentSecret: await keptSecret(store),
    blobs: new CachedBlobs(database),
    examples: new LocalExamples(database, () => retention),
    engine: webEngine,
    signingKey: (name) => heldSigningKey(database, name),
    conditions: async () => allowed(conditions(), rules),
    fetch: (...request) => fetch(...request), // a browser's is bound to its global object
    random: platformRandom,
    now: () => Date.now() / 1000,
    workSeconds: () => performance.now() / 1000,
    sleep: (seconds) => new Promise((resolve) => setTimeout(resolve, 1000 * seconds)),
    memoryBytes: memoryBytes(),
  };
}

/** The machine's memory, roughly, where the browser tells it. */
function memoryBytes(): number | null {
  const { deviceMemory } = navigator as Navigator & { readonly deviceMemory?: number };
  return deviceMemory === undefined ? null : deviceMemory * GIB;
}

/** The signing key of that name, made at the first call. Throws StateDamaged where the browser has no Ed25519. */
async function heldSigningKey(database: IDBDatabase, name: string): Promise<SigningKey> {
  const kept = await look(database, "keys", (keys) => keys.get(name) as IDBRequest<CryptoKeyPair | undefined>);
  const pair = kept ?? (await newPair());
  if (kept === undefined) {
    await change(database, ["keys"], (of) => of("keys").put(pair, name));
  }
  return {
    public: new Uint8Array(await crypto.subtle.exportKey("raw", pair.publicKey)),
    sign: async (message) => new Uint8Array(await crypto.subtle.sign("Ed25519", pair.privateKey, message)),
  };
}

async function newPair(): Promise<CryptoKeyPair> {
  try {
    return (await crypto.subtle.generateKey("Ed25519", false, ["sign", "verify"])) as CryptoKeyPair;
  } catch (error) {
    throw new StateDamaged(`this browser cannot make a key of Ed25519; a newer one can: ${String(error)}`);
  }
}

type Session = Awaited<ReturnType<OnnxRuntime["InferenceSession"]["create"]>>;

const MOST_GRAPH_BYTES = 64 << 20;
/** A run holds the thread. What waits for it, such as answers and timers, gets a turn this often. */
const TURN_MS = 50;

ort.env.wasm.numThreads = 1;

/** ONNX Runtime in this worker. */
export const webEngine: Engine = {
  name: `onnxruntime-web ${ort.env.versions.web ?? ort.env.versions.common}`,
  ort: { Tensor: ort.Tensor as unknown as OnnxRuntime["Tensor"], InferenceSession: { create } },
};

/** Sessions by the digest of their graph, the longest unused first. */
const loaded = new Map<string, { readonly session: ort.InferenceSession; readonly bytes: number }>();
/** How often each graph is in use. */
const running = new Map<string, number>();
let turnAt = 0;

async function create(graph: Bytes, options?: ort.InferenceSession.SessionOptions): Promise<Session> {
  const digest = hex(await sha256(graph));
  const { session } = loaded.get(digest) ?? { session: await ort.InferenceSession.create(graph, options) };
  loaded.delete(digest);
  loaded.set(digest, { session, bytes: graph.length });
  running.set(digest, (running.get(digest) ?? 0) + 1);
  return {
    inputNames: session.inputNames,
    outputNames: session.outputNames,
    run: async (feeds: ort.InferenceSession.FeedsType, fetches: readonly string[]) => {
      await letOthersRun();
      return session.run(feeds, fetches);
    },
    release: async () => {
      running.set(digest, (running.get(digest) ?? 1) - 1);
      await trim();
    },
  } as unknown as Session;
}

/** Let go of the longest unused graphs beyond the size. */
async function trim(): Promise<void> {
  let total = [...loaded.values()].reduce((sum, { bytes }) => sum + bytes, 0);
  for (const [digest, { session, bytes }] of [...loaded]) {
    if (total > MOST_GRAPH_BYTES && !running.get(digest)) {
      loaded.delete(digest);
      total -= bytes;
      await session.release();
    }
  }
}

async function letOthersRun(): Promise<void> {
  if (performance.now() - turnAt < TURN_MS) return;
  await new Promise<void>((resolve) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resolve();
    };
    port2.postMessage(null);
  });
  turnAt = performance.now();
}
