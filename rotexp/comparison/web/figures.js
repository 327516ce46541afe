// The figures, each drawn anew from the runs that the table shows.

const LAYOUT = {
  margin: { l: 70, r: 15, t: 10, b: 50 },
  showlegend: false,
  hovermode: "closest",
  font: { family: "system-ui, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif", size: 13, color: "#1d2733" },
  paper_bgcolor: "#fff",
  plot_bgcolor: "#fff",
};
const LINES = { gridcolor: "#e4e8ec", zerolinecolor: "#c4ccd4", linecolor: "#b9c3cd", automargin: true };
const OPTIONS = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
const chosen = (id) => document.getElementById(id).value;

const crowded = (runs) => runs.length > 24;

function draw(name, traces, { x, y, caption, runs, ...layout }) {
  const axes = { xaxis: { ...LINES, ...x }, yaxis: { ...LINES, ...y } };
  const empty = traces.length
    ? []
    : [{ text: "no run shown has this figure", showarrow: false, xref: "paper", yref: "paper", x: 0.5, y: 0.5 }];
  Plotly.react(`${name}-plot`, traces, { ...LAYOUT, ...axes, annotations: empty, ...layout }, OPTIONS);
  const text = document.querySelector(`[data-figure="${name}"] figcaption`);
  text.replaceChildren(caption, commandsOf(runs));
}

// What makes a figure again: the report's command, and that of every run in it.
function commandsOf(runs) {
  const details = element("details", {}, element("summary", {}, "the commands that made this figure"));
  const fill = () =>
    details.append(
      ...[DATA.command, ...runs.map((run) => run.command)]
        .filter(Boolean)
        .map((command) => element("code", {}, command)),
    );
  details.addEventListener("toggle", fill, { once: true });
  return details;
}

function showLegend(runs) {
  const shown = new Map(runs.map((run) => [colorValue(run, colored.by), styleOf(run).color]));
  const values = [...shown].map(([value, color]) => element("li", {}, swatch(color, "solid"), value || "(none)"));
  const seedsAlike = DATA.seed && colorValues(colored.by).length <= COLORS.length;
  const firsts = seedsAlike
    ? SEEDS.map((seed) => runs.find((run) => run.axes[DATA.seed] === seed)).filter(Boolean)
    : [];
  const seeds = firsts.map((run) =>
    element("li", {}, swatch("#5c6875", styleOf(run).dash), `seed ${run.axes[DATA.seed]}`),
  );
  document.querySelector("#legend ul").replaceChildren(...values, ...seeds);
}

function swatch(color, dash) {
  const strokes = { solid: "", dash: "7 4", dot: "2 3", dashdot: "7 3 2 3", longdash: "12 4" };
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const attributes = {
    x1: 0,
    x2: 28,
    y1: 5,
    y2: 5,
    stroke: color,
    "stroke-width": 3,
    "stroke-dasharray": strokes[dash],
  };
  for (const [name, value] of Object.entries({ width: 28, height: 10 })) svg.setAttribute(name, value);
  for (const [name, value] of Object.entries(attributes)) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

function drawCurve(name, runs, { metric, over, scale }) {
  const shown = runs.filter((run) => metric in run.series);
  const values = shown.flatMap((run) => run.series[metric][1].map(toNumber));
  const axis = scale === "log" ? logarithmicAxis(values) : linearAxis();
  const traces = shown.map((run) => {
    const [steps, points] = run.series[metric];
    const { color, dash, symbol } = styleOf(run);
    return {
      x: clockOf(run, steps, over),
      y: points.map((value) => axis.place(toNumber(value))),
      customdata: points.map((value, index) => [showNumber(value), steps[index]]),
      name: plotText(labelOf(run)),
      mode: steps.length > 60 ? "lines" : "lines+markers",
      line: { color, dash, width: crowded(shown) ? 1 : 2 },
      marker: { symbol, size: 6 },
      hovertemplate: "%{customdata[0]} at step %{customdata[1]}<extra>%{fullData.name}</extra>",
    };
  });
  const { unit, meaning } = DATA.metrics[metric] ?? { unit: "", meaning: "" };
  const said = `${metric}: ${meaning || "not in the registry of metrics"}.`;
  const caption = shown.length ? said + thinnedText(shown, metric) + notFinite(shown, metric) : "";
  draw(name, traces, {
    x: { title: { text: CLOCKS[over] } },
    y: { title: { text: withUnit(metric.split("/").pop(), unit) }, ...axis.layout },
    caption,
    runs: shown,
  });
}

function thinnedText(runs, metric) {
  const most = Math.max(0, ...runs.map((run) => run.series[metric][0].length));
  return most >= DATA.most_points ? ` Long curves are thinned to about ${DATA.most_points} points.` : "";
}

function notFinite(runs, metric) {
  const found = runs.flatMap((run) => {
    const index = run.series[metric][1].findIndex((value) => typeof value === "string");
    return index < 0 ? [] : [`${run.name} is ${run.series[metric][1][index]} at step ${run.series[metric][0][index]}`];
  });
  return found.length ? ` Not finite, and not drawn: ${found.join("; ")}.` : "";
}

function drawMemory(runs) {
  const figure = chosen("memory-figure");
  const phases = PHASES.filter((phase) => ["", phase].includes(chosen("memory-phase")));
  const single = phases.length === 1;
  const shown = runs.filter((run) => phases.some((phase) => `${figure}_max` in (run.memory[phase] ?? {})));
  const traces = shown.map((run) => {
    const highest = phases.map((phase) => toNumber(run.memory[phase]?.[`${figure}_max`]) ?? null);
    const lowest = phases.map((phase, index) => toNumber(run.memory[phase]?.[`${figure}_min`]) ?? highest[index]);
    const { color, pattern } = styleOf(run);
    const name = plotText(labelOf(run));
    return {
      type: "bar",
      x: single ? [plotText(run.name)] : phases,
      y: highest,
      name,
      error_y: {
        type: "data",
        symmetric: false,
        array: highest.map(() => 0),
        arrayminus: highest.map((value, index) => value - lowest[index]),
        thickness: 1.5,
        width: crowded(shown) ? 0 : 3,
      },
      marker: {
        color,
        pattern: {
          shape: crowded(shown) ? "" : pattern,
          fillmode: "overlay",
          fgcolor: "#fff",
          size: 6,
          solidity: 0.25,
        },
      },
      customdata: highest.map((value, index) => [showNumber(value), showNumber(lowest[index])]),
      hovertemplate: "%{customdata[0]} GiB, rank with least %{customdata[1]}<extra>%{fullData.name}</extra>",
    };
  });
  const caption = "A bar reaches the rank with the largest peak; its whisker goes down to the rank with the smallest.";
  const named = shown.length <= 12 && shown.every((run) => run.name.length <= 30);
  const x = single ? { showticklabels: named } : { title: { text: "phase" } };
  draw("memory", traces, {
    x: { type: "category", ...x },
    y: { title: { text: "peak (GiB)" }, rangemode: "tozero" },
    barmode: single ? "relative" : "group",
    caption,
    runs: shown,
  });
}

function drawCost(runs) {
  const [quality, cost] = ["cost-quality", "cost-measure"].map((id) =>
    DATA.figures.find(({ key }) => key === chosen(id)),
  );
  const known =
    quality && cost ? runs.filter((run) => [quality, cost].every(({ key }) => Number.isFinite(run.figures[key]))) : [];
  const axis = logarithmicAxis(known.map((run) => run.figures[cost.key]));
  const traces = known.map((run) => {
    const { color, symbol } = styleOf(run);
    return {
      x: [axis.place(run.figures[cost.key])],
      y: [run.figures[quality.key]],
      customdata: [[showNumber(run.figures[cost.key]), showNumber(run.figures[quality.key])]],
      name: plotText(labelOf(run)),
      mode: "markers",
      marker: {
        color,
        symbol: run.status === "done" ? symbol : `${symbol}-open`,
        size: 11,
        line: { width: 1.5, color: run.status === "done" ? "#fff" : color },
      },
      hovertemplate: "%{customdata[1]} for %{customdata[0]}<extra>%{fullData.name}</extra>",
    };
  });
  const title = (figure) => ({ text: figure ? withUnit(figure.label, figure.unit) : "" });
  const better = quality?.better === "higher" ? "up" : "down";
  const caption = known.length
    ? `Cost: ${cost.meaning}. Left is cheaper, ${better} is better; open marks are runs that did not end well.`
    : "";
  draw("cost", traces, {
    x: { title: title(cost), ...axis.layout },
    y: { title: title(quality) },
    caption,
    runs: known,
  });
}
