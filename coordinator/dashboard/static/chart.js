// Reads the nearest point of a chart to the pointer out in words, in the paragraph under it.
document.addEventListener("pointermove", (event) => {
  const chart = event.target.closest?.("svg.chart");
  if (!chart) return;
  let nearest = null;
  let least = Infinity;
  for (const circle of chart.querySelectorAll("circle")) {
    const box = circle.getBoundingClientRect();
    const far = Math.hypot(box.x + box.width / 2 - event.clientX, (box.y + box.height / 2 - event.clientY) / 4);
    if (far < least) [nearest, least] = [circle, far];
  }
  if (!nearest) return;
  for (const circle of chart.querySelectorAll("circle.near")) circle.classList.remove("near");
  nearest.classList.add("near");
  chart.closest("figure").querySelector(".readout").textContent = nearest.textContent;
});
