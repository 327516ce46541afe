// Settings compared over seeds; the comparison itself was made with the report.

function makeSpreads() {
  const options = DATA.figures.filter(({ key }) => key in DATA.spreads);
  const usual = options.find(({ key }) => key === "eval/trained/perplexity") ?? options[0];
  const select = fillSelect(
    "spread-figure",
    options.map((figure) => [figure.key, withUnit(figure.label, figure.unit)]),
    showSpreads,
  );
  if (usual) select.value = usual.key;
  const head = (text, kind) => element("th", { scope: "col", class: kind }, text);
  const numbers = ["seeds", "runs", "mean", "± deviation", "difference from the best", "interval"].map((text) =>
    head(text, "number"),
  );
  document
    .querySelector("#spreads thead")
    .append(element("tr", {}, head("setting", ""), ...numbers, head("verdict", "")));
  document.getElementById("method").textContent = DATA.method;
  showSpreads();
}

function showSpreads() {
  const rows = (DATA.spreads[document.getElementById("spread-figure").value] ?? []).map((spread) => {
    const interval = spread.interval?.map((end) => showNumber(end, 3));
    const difference = spread.interval ? showNumber((spread.interval[0] + spread.interval[1]) / 2, 3) : "";
    const numbers = [
      spread.seeds,
      spread.runs,
      showNumber(spread.mean),
      showNumber(spread.deviation, 3),
      difference,
      interval?.join(" to ") ?? "",
    ];
    const cells = numbers.map((number) => element("td", { class: "number" }, String(number)));
    const row = { class: spread.verdict.startsWith("best") ? "best-setting" : "" };
    return element(
      "tr",
      row,
      element("th", { scope: "row" }, spread.setting),
      ...cells,
      element("td", {}, spread.verdict),
    );
  });
  document.querySelector("#spreads tbody").replaceChildren(...rows);
}
