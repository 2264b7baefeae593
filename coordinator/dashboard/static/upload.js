// Uploads the blobs of the chosen bundle, and puts its manifest into the form.
const form = document.querySelector("form.new-task");
const status = form.querySelector("[role=status]");
form.querySelector("input[data-fills]").addEventListener("change", async (event) => {
  form.elements[event.target.dataset.fills].value = (await event.target.files[0]?.text()) ?? "";
});
form.querySelector("input[webkitdirectory]").addEventListener("change", async (event) => {
  const files = [...event.target.files];
  const manifest = files.find((file) => file.name === "manifest.json");
  const blobs = files.filter((file) => /^[0-9a-f]{64}$/.test(file.name));
  if (!manifest) {
    status.textContent = "This folder has no manifest.json, so it is no bundle.";
    return;
  }
  for (const [index, blob] of blobs.entries()) {
    status.textContent = `Uploading file ${index + 1} of ${blobs.length}…`;
    const headers = { "X-CSRF-Token": form.elements.csrf.value };
    const answer = await fetch(`/new/blobs/${blob.name}`, { method: "PUT", body: blob, headers });
    if (!answer.ok) {
      const problem = await answer.json().catch(() => ({}));
      status.textContent = `Not uploaded: ${problem.detail ?? answer.statusText}`;
      return;
    }
  }
  form.elements.manifest.value = await manifest.text();
  status.textContent = `${blobs.length} files are uploaded.`;
});
