// One session of a device in a page, whose worker it drives; gives the outcome. Its state is that of the page's origin.
async ({ coordinator, population, policy, examples, labels, secret }) => {
  const conditions = { charging: null, idle: null, unmetered: null, battery: null, freeStorageBytes: null };
  const owner = { policy, rules: { onBattery: true, onMetered: true }, retention: { maxAgeS: 1e9, most: 1e6 } };
  const { href } = new URL(coordinator);
  const name = `muster ${JSON.stringify([href, population])}`;
  // A page's worker lives as long as the page: the runtime is compiled once.
  globalThis.worker ??= new Worker("worker.js", { type: "module" });
  const ran = () => new Promise((resolve) => {
    worker.onmessage = ({ data: { outcome, stopped } }) => resolve(outcome ?? { outcome: "failed", ...stopped });
    worker.onerror = ({ message }) => {
      worker.terminate();
      globalThis.worker = undefined;
      resolve({ outcome: "failed", reason: "worker", detail: message ?? "" });
    };
    worker.postMessage({ coordinator: href, population, conditions, once: true });
  });
  const stored = (work) => new Promise((resolve, reject) => {
    const opening = indexedDB.open(name);
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
      const transaction = opening.result.transaction(["texts", "examples"], "readwrite");
      transaction.oncomplete = () => { opening.result.close(); resolve(); };
      transaction.onabort = () => reject(transaction.error);
      work(transaction.objectStore("texts"), transaction.objectStore("examples"));
    };
  });
  const kinds = { float32: Float32Array, int64: BigInt64Array, int32: Int32Array, uint8: Uint8Array };
  const columns = Object.entries(examples).map(([name, { dtype, shape, data }]) => {
    const [count, ...rest] = shape;
    const values = new kinds[dtype](Uint8Array.from(atob(data), (one) => one.charCodeAt(0)).buffer);
    return { name, count, shape: rest, values, width: values.length / count };
  });
  const fields = (row) => columns.map(({ name, shape, values, width }) => [
    name, { shape, values: values.slice(row * width, (row + 1) * width) },
  ]);
  const outcome = (async () => {
    const made = (await indexedDB.databases()).some((one) => one.name === name);
    if (!made) await ran(); // it makes the database, finds no settings and calls nobody
    await stored((texts, kept) => {
      texts.delete(`due:${href}:${population}`);
      texts.put(JSON.stringify(owner), "owner");
      texts.put(JSON.stringify(labels), "labels");
      secret === null ? texts.delete("enrolment-secret") : texts.put(secret, "enrolment-secret");
      kept.clear();
      const at = Date.now() / 1000;
      for (let row = 0; row < Math.min(...columns.map(({ count }) => count)); row += 1) {
        kept.add({ collection: "default", at, fields: Object.fromEntries(fields(row)) });
      }
    });
    return await ran();
  })();
  return outcome.catch((error) => ({ outcome: "failed", reason: "page", detail: String(error) }));
}
