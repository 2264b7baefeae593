/** Calls over real HTTP and what is made of them: what they may take, holds on assignments, and enrolment. */

import { createServer, type RequestListener, type Server } from "node:http";
import type { AddressInfo } from "node:net";
import { setTimeout as sleep } from "node:timers/promises";
import { gzipSync } from "node:zlib";
import { afterEach, expect, test, vi } from "vitest";
import { base64 } from "../src/core/bytes.ts";
import { platformRandom, signingKey } from "../src/core/cryptography.ts";
import { BadAnswer, PolicyForbids, Refused, Unreachable } from "../src/core/errors.ts";
import { policyOf } from "../src/core/permission/policy.ts";
import { keptSigningKey, type Platform } from "../src/core/platform.ts";
import { type Call, keyText, send } from "../src/core/protocol/call.ts";
import { deviceKeys, Enrolments } from "../src/core/protocol/enrolment.ts";
import { Hold, Transport } from "../src/core/protocol/transport.ts";
import type { Assignment } from "../src/core/wire/messages.ts";
import { MemoryStore } from "./memory-store.ts";

const platform = { fetch, random: platformRandom } as unknown as Platform;
let server: Server | null = null;
afterEach(() => {
  server?.closeAllConnections();
  server?.close();
});

test("an answer that keeps coming may take longer than the time-out", async () => {
  const call = { method: "GET", path: "/", timeoutS: 1 };
  const [answer, moved] = await ask(call, async (_, response) => {
    for (let piece = 0; piece < 4; piece++) {
      await sleep(400);
      response.write("piece");
    }
    response.end();
  });
  expect((await answer).body.length).toBe(20);
  expect(moved.down).toBe(20);
});

test("an answer that breaks off is not waited for", async () => {
  const call = { method: "GET", path: "/", timeoutS: 0.2 };
  const [answer] = await ask(call, (_, response) => response.write("piece"));
  await expect(answer).rejects.toThrow(/broke off/);
});

test("an answer that comes byte by byte is cut once its longest time is over", async () => {
  const call = { method: "GET", path: "/", timeoutS: 0.2, most: 100 };
  const [answer] = await ask(call, async (_, response) => {
    for (let piece = 0; piece < 20; piece++) {
      await sleep(50);
      response.write(" ");
    }
  });
  await expect(answer).rejects.toThrow(/too slowly/);
});

test("an answer that unpacks to more than may be read is cut there", async () => {
  const packed = gzipSync(new Uint8Array(1 << 26));
  const [answer, moved] = await ask({ method: "GET", path: "/" }, (_, response) => {
    response.writeHead(200, { "content-encoding": "gzip" }).end(packed);
  });
  await expect(answer).rejects.toThrow(BadAnswer);
  expect(moved.down).toBeLessThan(1 << 22);
});

test("an upload has time by its size, and is counted", async () => {
  const call = { method: "PUT", path: "/", body: new Uint8Array(10_000), timeoutS: 0.05 };
  const [answer, moved] = await ask(call, async (request, response) => {
    await sleep(500);
    request.resume().on("end", () => response.end());
  });
  expect((await answer).status).toBe(200);
  expect(moved.up).toBe(10_000);
});

test("an upload that is never answered is counted", async () => {
  const call = { method: "PUT", path: "/", body: new Uint8Array(10), timeoutS: 0.2 };
  const [answer, moved] = await ask(call, (request) => request.resume());
  await expect(answer).rejects.toThrow(Unreachable);
  expect(moved.up).toBe(10);
});

test("a call stays at the host of its coordinator, whatever the path of that address is", async () => {
  let asked: string | undefined;
  const answers: RequestListener = (request, response) => {
    asked = request.url;
    response.end();
  };
  const [answer] = await ask({ method: "GET", path: "/v1/server" }, answers, "//elsewhere.invalid/here/");
  expect((await answer).status).toBe(200);
  expect(asked).toBe("//elsewhere.invalid/here/v1/server");
});

test("an answer may come in more pieces than a call has arguments", async () => {
  let left = 200_000;
  const body = new ReadableStream<Uint8Array>({
    pull: (pieces) => (left-- > 0 ? pieces.enqueue(Uint8Array.of(left & 255)) : pieces.close()),
  });
  const inPieces = { ...platform, fetch: async () => new Response(body) } as unknown as Platform;
  const signer = { keyid: "d-0", key: await signingKey(new Uint8Array(32)) };
  const call = { method: "GET", path: "/", most: 200_000 };
  const answer = await send(inPieces, new URL("http://127.0.0.1"), call, signer, 1, { up: 0, down: 0 });
  expect([answer.body.length, answer.body[0]]).toEqual([200_000, 199_999 & 255]);
});

async function ask(call: Call, listener: RequestListener, path = "") {
  server = createServer(listener);
  await new Promise<void>((resolve) => server?.listen(0, "127.0.0.1", resolve));
  const base = new URL(`http://127.0.0.1:${(server.address() as AddressInfo).port}${path}`);
  const signer = { keyid: "d-0", key: await signingKey(new Uint8Array(32)) };
  const moved = { up: 0, down: 0 };
  return [send(platform, base, call, signer, 1, moved), moved] as const;
}

test.each(["no-longer-needed", "too-stale"])("work stops once the coordinator says %s", async (reason) => {
  const refused = new Refused(410, reason, "", { retry: null, afterS: 0, theirTime: null });
  const transport = { spokeAt: -Infinity, hold: () => Promise.reject(refused) } as unknown as Transport;
  let now = 0;
  const sleep = async (seconds: number) => {
    now += seconds;
  };
  const platform = { now: () => now, sleep } as unknown as Platform;
  const hold = new Hold(platform, transport, { assignment: "a", lost_after_s: 5 } as Assignment);
  await vi.waitFor(() => expect(() => hold.check()).toThrow(refused));
  hold.end();
});

test("a hold is opened again soon though the clock is set back", async () => {
  const [held, slept] = [[] as number[], [] as number[]];
  let now = 1e9;
  const open = async () => {
    now -= 1e8;
    held.push(now);
  };
  const transport = { spokeAt: now, hold: open } as unknown as Transport;
  const sleep = async (seconds: number) => {
    slept.push(seconds);
    now += seconds;
    if (slept.length >= 5) await new Promise(() => {}); // this is enough
  };
  const platform = { now: () => now, sleep } as unknown as Platform;
  const hold = new Hold(platform, transport, { assignment: "a", lost_after_s: 5 } as Assignment);
  await vi.waitFor(() => expect(slept).toHaveLength(5));
  hold.end();
  expect(Math.max(...slept)).toBeLessThanOrEqual(1);
  expect(held).toHaveLength(4);
});

test.each(["coordinator", "authority"])(
  "a stop is heard while the %s does not answer an introduction",
  async (whose) => {
    const stop = new AbortController();
    let parties: object | null = null;
    const [answer] = await ask({ method: "GET", path: "/" }, (request, response) => {
      const asked = request.url === "/v1/devices" ? "coordinator" : "authority";
      if (asked === whose && request.url !== "/") return void setTimeout(() => stop.abort(), 100);
      const body = JSON.stringify({ device: "d-0", secagg: parties });
      response.writeHead(200, { "content-type": "application/json" }).end(body);
    });
    await answer;
    const { port } = server!.address() as AddressInfo;
    const [key, url] = [base64(new Uint8Array(32)), new URL(`http://127.0.0.1:${port}`)];
    parties = { server: { first: key, successors: [] }, authority: key, authority_url: url.href };
    const store = new MemoryStore();
    const signing = (name: string) => keptSigningKey(store, name);
    const now = () => Date.now() / 1000;
    const here = { ...platform, store, now, signingKey: signing, sleep: () => sleep(1) } as unknown as Platform;
    const transport = new Transport(here, url);
    transport.stopping = stop.signal;
    const enrolments = await Enrolments.of(
      here,
      { coordinator: url, population: "p", policy: policyOf({}) },
      transport,
    );
    await expect(enrolments.credential()).rejects.toThrow(Unreachable);
    expect(stop.signal.aborted).toBe(true);
  },
);

test("an authority without TLS is not asked where the policy demands TLS", async () => {
  const asked: string[] = [];
  const refuse = async (url: URL) => {
    asked.push(url.href);
    throw new Error("no network");
  };
  const store = new MemoryStore();
  const given = { store, random: platformRandom, now: () => 1, fetch: refuse };
  const platform = { ...given, signingKey: (name: string) => keptSigningKey(store, name) } as unknown as Platform;
  const coordinator = new URL("https://fl.example");
  const [key, authority] = [keyText((await deviceKeys(platform)).device.public), base64(new Uint8Array(32))];
  const shown = { key: authority, url: "http://authority.example" };
  const enrolment = { key, device: "d-0", known: true, parties: { server: authority, authority }, shown };
  await store.write({ [`enrolment:${coordinator.href}`]: JSON.stringify(enrolment) });
  const place = { coordinator, population: "p", policy: policyOf({ require_https: true }) };
  const transport = new Transport(platform, coordinator);
  const enrolments = await Enrolments.of(platform, place, transport);
  await expect(enrolments.credential()).rejects.toThrow(PolicyForbids);
  expect(asked).toEqual([]);
});
