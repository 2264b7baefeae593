// One session of a device in a page, whose worker it drives; its last argument hears the outcome.
const [coordinator, population, policy, examples, done] = arguments;
const conditions = { charging: true, idle: null, unmetered: null, battery: null, freeStorageBytes: null };
const owner = { policy, rules: { onBattery: true, onMetered: true }, retention: { maxAgeS: 1e9, most: 1e6 } };
const ran = () => new Promise((resolve) => {
  const worker = new Worker("/worker.js", { type: "module" });
  const end = (outcome) => { worker.terminate(); resolve(outcome); };
  worker.onmessage = ({ data: { outcome, stopped } }) => end(outcome ?? { outcome: "failed", device: "", ...stopped });
  worker.onerror = ({ message }) => end({ outcome: "failed", reason: "worker", detail: message });
  worker.postMessage({ coordinator, population, conditions });
});
const stored = (work) => new Promise((resolve, reject) => {
  const opening = indexedDB.open("muster");
  opening.onsuccess = () => {
    const transaction = opening.result.transaction(["texts", "examples"], "readwrite");
    transaction.oncomplete = () => { opening.result.close(); resolve(); };
    transaction.onabort = () => reject(transaction.error);
    work(transaction.objectStore("texts"), transaction.objectStore("examples"));
  };
});
const values = ({ dtype, values }) => (dtype === "int64" ? BigInt64Array.from(values, BigInt) : Float32Array.from(values, Number));
(async () => {
  const made = (await indexedDB.databases()).length > 0;
  if (!made) await ran(); // it makes the database, finds no settings and calls nobody
  await stored((texts, kept) => {
    texts.delete(`due:${coordinator}:${population}`);
    texts.put(JSON.stringify(owner), "owner");
    kept.clear();
    for (const fields of examples) {
      const columns = Object.entries(fields).map(([name, one]) => [name, { shape: one.shape, values: values(one) }]);
      kept.add({ collection: "default", at: Date.now() / 1000, fields: Object.fromEntries(columns) });
    }
  });
  done(await ran());
})().catch((error) => done({ outcome: "failed", reason: "page", detail: String(error) }));
