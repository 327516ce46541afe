// The table of runs: sorted by a column, filtered by status, bits and axis.

const state = {
  sort: { column: "run", direction: 1 },
  filters: new Map(), // by axis, "status" or "bits": the values to show; an empty set shows all
  search: "",
  chosen: new Set(DATA.runs.slice(0, 2)),
};

const OWN = DATA.bits ? ["status", "bits"] : ["status"]; // columns of texts that are no axes
const FILTERS = [...OWN, ...DATA.axes];
const textOf = (run, name) => (OWN.includes(name) ? run[name] : run.axes[name]);

function columnValue(run, column) {
  if (column === "run") return run.name;
  if (column in run.figures) return toNumber(run.figures[column]);
  return textOf(run, column);
}

function shownRuns() {
  const passes = (run) =>
    FILTERS.every((name) => !state.filters.get(name)?.size || state.filters.get(name).has(textOf(run, name)));
  const found = (run) => `${run.name} ${run.setting} ${run.remark}`.toLowerCase().includes(state.search);
  const { column, direction } = state.sort;
  return DATA.runs
    .filter((run) => passes(run) && found(run))
    .sort((first, second) => compareValues(columnValue(first, column), columnValue(second, column), direction));
}

function makeFilters(changed) {
  const search = element("input", { type: "search", placeholder: "search", "aria-label": "search runs" });
  search.addEventListener("input", () => {
    state.search = search.value.toLowerCase();
    changed();
  });
  const groups = FILTERS.map((name) => {
    const values = [...new Set(DATA.runs.map((run) => textOf(run, name)))].sort((a, b) => compareValues(a, b, 1));
    state.filters.set(name, new Set());
    const buttons = values.map((value) => filterButton(name, value, changed));
    return values.length > 1
      ? element("div", { class: "filter", "data-filter": name }, element("span", {}, name), ...buttons)
      : "";
  });
  document.getElementById("filters").append(...groups, search);
}

function filterButton(name, value, changed) {
  const chosen = state.filters.get(name);
  const button = element("button", { type: "button", "aria-pressed": "false" }, value || "(none)");
  button.addEventListener("click", () => {
    if (!chosen.delete(value)) chosen.add(value);
    button.setAttribute("aria-pressed", String(chosen.has(value)));
    changed();
  });
  return button;
}

function makeHead(changed) {
  const meaning = (key) => (key === "bits" ? DATA.bits : "");
  const columns = ["run", ...FILTERS].map((key) => ({ key, text: key, below: "", meaning: meaning(key) }));
  for (const column of columns) {
    const [, group, name] = column.key.match(/^(.*)\.([^.]+)$/) ?? [null, "", column.key];
    Object.assign(column, { text: name, below: group && `of ${group}` });
  }
  columns.push(
    ...DATA.figures.map(({ key, label, unit, meaning, better }) => ({
      key,
      text: label,
      below: unit,
      meaning,
      better,
      number: true,
    })),
  );
  document
    .querySelector("#summary thead")
    .append(element("tr", {}, ...columns.map((column) => headOf(column, changed))));
}

function headOf({ key, text, below, meaning, better, number }, changed) {
  const sort = () => {
    const same = state.sort.column === key;
    state.sort = { column: key, direction: same ? -state.sort.direction : better === "higher" ? -1 : 1 };
    changed();
  };
  const button = element("button", { type: "button", onclick: sort }, text);
  const note = below ? [element("span", { class: "below" }, below)] : [];
  return element(
    "th",
    { scope: "col", "data-column": key, class: number ? "number" : "", title: meaning || key },
    button,
    ...note,
  );
}

function bestValues(runs) {
  const best = {};
  for (const { key, better } of DATA.figures) {
    const values = runs
      .filter((run) => run.status === "done")
      .map((run) => run.figures[key])
      .filter(Number.isFinite);
    if (better && new Set(values).size > 1) best[key] = better === "lower" ? Math.min(...values) : Math.max(...values);
  }
  return best;
}

function showSummary(runs, choose) {
  const best = bestValues(runs);
  const rows = runs.map((run) => {
    const box = element("input", { type: "checkbox", "aria-label": `choose ${run.name}` });
    box.checked = state.chosen.has(run);
    box.addEventListener("change", () => choose(run, box.checked));
    const remark = run.remark ? [element("span", { class: "remark" }, run.remark)] : [];
    return element(
      "tr",
      {},
      element("th", { scope: "row", title: run.folder }, element("span", { class: "run-name" }, box, run.name)),
      element("td", {}, element("span", { class: `status ${run.status}` }, run.status), ...remark),
      ...FILTERS.slice(1).map((name) => element("td", {}, textOf(run, name))),
      ...DATA.figures.map(({ key }) => {
        const isBest = run.status === "done" && key in best && run.figures[key] === best[key];
        return element("td", { class: isBest ? "number best" : "number" }, showNumber(run.figures[key]));
      }),
    );
  });
  document.querySelector("#summary tbody").replaceChildren(...rows);
  for (const head of document.querySelectorAll("#summary thead th")) {
    const direction = state.sort.direction > 0 ? "ascending" : "descending";
    head.setAttribute("aria-sort", head.dataset.column === state.sort.column ? direction : "none");
  }
  document.getElementById("shown").textContent = `${runs.length} of ${plural(DATA.runs.length)}`;
}
