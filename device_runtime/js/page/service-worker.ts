/** The service worker: it keeps the page's files, so that examples can be collected without a network. */

// A script of a service worker has another global object than a page; these are the parts that are used here.
interface Waiting extends Event {
  waitUntil(work: Promise<unknown>): void;
}
interface Fetching extends Event {
  readonly request: Request;
  respondWith(answer: Promise<Response>): void;
}

/** The page's files and their version, which the build fills in. The engine is kept when it is first fetched. */
declare const FILES: readonly string[];
declare const VERSION: string;

const CACHE = `muster-page-${VERSION}`;
const scope = self as unknown as { readonly clients: { claim(): Promise<void> }; skipWaiting(): Promise<void> };

self.addEventListener("install", (event) => {
  const kept = caches.open(CACHE).then((cache) => cache.addAll(FILES.filter((name) => !name.endsWith(".wasm"))));
  (event as Waiting).waitUntil(kept.then(() => scope.skipWaiting()));
});

self.addEventListener("activate", (event) => {
  (event as Waiting).waitUntil(removeOlder().then(() => scope.clients.claim()));
});

self.addEventListener("fetch", (event) => {
  const { request, respondWith } = event as Fetching;
  const url = new URL(request.url);
  url.search = "";
  const known = ["", ...FILES].some((name) => url.href === new URL(name, location.href.replace(/[^/]*$/, "")).href);
  if (request.method === "GET" && known) respondWith.call(event, kept(url, request));
});

async function kept(url: URL, request: Request): Promise<Response> {
  const cache = await caches.open(CACHE);
  const name = url.pathname.endsWith("/") ? new URL("index.html", url) : url;
  const found = await cache.match(name);
  if (found !== undefined) return found;
  const answer = await fetch(request);
  if (answer.ok) await cache.put(name, answer.clone()).catch(() => undefined); // full storage: it is fetched each time
  return answer;
}

async function removeOlder(): Promise<void> {
  const names = (await caches.keys()).filter((name) => name.startsWith("muster-page-") && name !== CACHE);
  await Promise.all(names.map((name) => caches.delete(name)));
}
