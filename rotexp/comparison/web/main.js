// Puts the page together, and keeps its parts in step.

const PHASES = [...new Set(DATA.runs.flatMap((run) => Object.keys(run.memory)))];
const MEMORY_FIGURES = {
  peak_allocated_gib: "the allocator: handed out",
  peak_reserved_gib: "the allocator: held",
  peak_rss_gib: "the process: resident",
};

function drawCurves(runs) {
  const over = chosen("curve-over");
  drawCurve("curve", runs, { metric: chosen("curve-metric"), over, scale: chosen("curve-scale") });
  drawCurve("divergence", runs, { metric: "replica/max_abs_diff", over, scale: "log" });
  drawCurve("drift", runs, { metric: "rotation/orthogonality_rrt_max", over, scale: "log" });
}

function changed() {
  const runs = shownRuns();
  showSummary(runs, (run, isChosen) => {
    if (isChosen) state.chosen.add(run);
    else state.chosen.delete(run);
    showDifferences();
  });
  showLegend(runs);
  drawCurves(runs);
  drawMemory(runs);
  drawCost(runs);
}

function choose(runs) {
  state.chosen = new Set(runs);
  changed();
  showDifferences();
}

function makeControls() {
  const redraw = (draw) => () => draw(shownRuns());
  const metrics = Object.keys(DATA.metrics);
  const select = fillSelect(
    "curve-metric",
    metrics.map((key) => [key, withUnit(key, DATA.metrics[key].unit)]),
    redraw(drawCurves),
  );
  select.value = metrics.includes("train/loss") ? "train/loss" : (metrics[0] ?? "");
  const recolor = () => {
    colored.by = chosen("color-by");
    changed();
  };
  fillSelect(
    "color-by",
    colorings().map((name) => [name, name]),
    recolor,
  ).value = colored.by;
  for (const id of ["curve-over", "curve-scale"])
    document.getElementById(id).addEventListener("change", redraw(drawCurves));
  const has = (figure) => DATA.runs.some((run) => PHASES.some((phase) => `${figure}_max` in (run.memory[phase] ?? {})));
  fillSelect(
    "memory-figure",
    Object.entries(MEMORY_FIGURES).filter(([figure]) => has(figure)),
    redraw(drawMemory),
  );
  fillSelect("memory-phase", [["", "all"], ...PHASES.map((phase) => [phase, phase])], redraw(drawMemory));
  const figures = (keep) =>
    DATA.figures.filter(keep).map((figure) => [figure.key, withUnit(figure.label, figure.unit)]);
  const quality = fillSelect(
    "cost-quality",
    figures(({ key, better }) => key.startsWith("eval/") && better),
    redraw(drawCost),
  );
  if ([...quality.options].some(({ value }) => value === "eval/trained/perplexity"))
    quality.value = "eval/trained/perplexity";
  const costs = fillSelect(
    "cost-measure",
    figures(({ unit }) => unit === "device-hours"),
    redraw(drawCost),
  );
  if ([...costs.options].some(({ value }) => value === "device_hours")) costs.value = "device_hours";
}

function showHeader() {
  if (DATA.runs.length === 1) document.body.classList.add("single");
  const counts = new Map();
  for (const { status } of DATA.runs) counts.set(status, (counts.get(status) ?? 0) + 1);
  document.getElementById("counts").textContent =
    `${plural(DATA.runs.length)}: ${[...counts].map(([status, count]) => `${count} ${status}`).join(", ")}`;
  document.getElementById("made").textContent = DATA.made;
  document.getElementById("command").textContent = DATA.command;
  document.getElementById("notes").append(...DATA.notes.map((note) => element("li", {}, note)));
}

showHeader();
showChecks();
makeFilters(changed);
makeHead(changed);
makeSpreads();
makeControls();
document.getElementById("choose-shown").addEventListener("click", () => choose(shownRuns()));
document.getElementById("choose-none").addEventListener("click", () => choose([]));
changed();
showDifferences();
