// How the configurations of the chosen runs differ.

function showDifferences() {
  const runs = DATA.runs.filter((run) => state.chosen.has(run));
  const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))];
  const text = (run, key) => (key in run.config ? showValue(run.config[key]) : "");
  const differing = keys.filter((key) => new Set(runs.map((run) => text(run, key))).size > 1);
  const said =
    runs.length < 2
      ? "Choose two runs or more."
      : `${differing.length} of ${keys.length} keys differ between ${runs.length} runs.`;
  document.getElementById("chosen-text").textContent = said;
  const heads = ["key", ...runs.map((run) => run.name)].map((name) => element("th", { scope: "col" }, name));
  const rows = differing.map((key) =>
    element("tr", {}, element("th", { scope: "row" }, key), ...runs.map((run) => element("td", {}, text(run, key)))),
  );
  document.querySelector("#differing thead").replaceChildren(element("tr", {}, ...heads));
  document.querySelector("#differing tbody").replaceChildren(...rows);
}
