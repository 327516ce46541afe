// Axes of figures: the clock of curves, and logarithms that also show zero.

const CLOCKS = { step: "step", tokens: "training tokens", seconds: "training time (s)" };

// Places of a run's steps on the chosen axis; null where the run does not say.
function clockOf(run, steps, over) {
  if (over === "step") return steps;
  const places = new Map(run.clock.steps.map((step, index) => [step, run.clock[over][index]]));
  return steps.map((step) => places.get(step) ?? null);
}

// A logarithmic axis for these values: where each lies, and what Plotly is told. Zero lies a decade below the smallest.
function logarithmicAxis(values) {
  const finite = values.filter((value) => Number.isFinite(value));
  const positive = finite.filter((value) => value > 0);
  const low = positive.length ? Math.floor(Math.log10(Math.min(...positive))) : -8;
  const high = positive.length ? Math.max(low + 1, Math.ceil(Math.log10(Math.max(...positive)))) : 0;
  const hasZero = finite.some((value) => value === 0);
  const bottom = low - 1;
  const every = Math.ceil((high - low) / 8);
  const decades = Array.from({ length: Math.floor((high - low) / every) + 1 }, (_, index) => low + index * every);
  const ticks = hasZero ? [bottom, ...decades] : decades;
  return {
    place: (value) => (value === 0 ? 10 ** bottom : value > 0 && Number.isFinite(value) ? value : null),
    layout: {
      type: "log",
      range: [(hasZero ? bottom : low) - 0.15, high + 0.15],
      tickvals: ticks.map((power) => 10 ** power),
      ticktext: ticks.map((power) => (hasZero && power === bottom ? "0" : decadeText(power))),
    },
  };
}

function decadeText(power) {
  return power >= -2 && power <= 4 ? String(Number((10 ** power).toPrecision(1))) : `1e${power}`;
}

function linearAxis() {
  return { place: (value) => (Number.isFinite(value) ? value : null), layout: { type: "linear" } };
}
