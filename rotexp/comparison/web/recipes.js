// How the figures of runs compare with those of recipes; the comparison itself was made with the report.

function showChecks() {
  if (DATA.checks.length === 0) document.body.classList.add("unchecked");
  if (DATA.bits) document.getElementById("bits").textContent = `Bits: ${DATA.bits}.`;
  const columns = ["recipe", "run", "equal bits", "within tolerance", "moved", "verdict"];
  const heads = columns.map((name) => element("th", { scope: "col" }, name));
  const rows = DATA.checks.map((check) => {
    const numbers = [check.equal, check.within, check.moved].map((count) => element("td", {}, String(count)));
    const faults = check.faults.map((line) => element("span", { class: "remark fault" }, line));
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, check.recipe),
      element("td", {}, check.run ?? ""),
      ...numbers,
      element("td", {}, check.verdict, ...faults),
    );
  });
  document.querySelector("#checks thead").replaceChildren(element("tr", {}, ...heads));
  document.querySelector("#checks tbody").replaceChildren(...rows);
}
