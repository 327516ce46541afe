// The report's data, and how its values are shown.
"use strict";

const DATA = JSON.parse(document.getElementById("data").textContent);
const COLORS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#5d5d5d"];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const SYMBOLS = ["circle", "square", "diamond", "triangle-up", "cross"];
const PATTERNS = ["", "/", "x", ".", "-"];

// JSON holds numbers that are not finite as texts.
function toNumber(value) {
  return { nan: NaN, inf: Infinity, "-inf": -Infinity }[value] ?? value;
}

function showNumber(value, digits = 4) {
  const number = toNumber(value);
  if (number === null || number === undefined) return "";
  if (!Number.isFinite(number)) return String(value);
  const size = Math.abs(number);
  if (size && (size < 1e-3 || size >= 1e7)) return number.toExponential(Math.max(1, digits - 2));
  const decimals = size ? Math.max(0, digits - 1 - Math.floor(Math.log10(size))) : 0;
  const shown = Number.isInteger(number) ? 0 : decimals;
  return number.toLocaleString("en-US", { minimumFractionDigits: shown, maximumFractionDigits: shown });
}

function showValue(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function withUnit(label, unit) {
  return unit ? `${label} (${unit})` : label;
}

function plural(count) {
  return count === 1 ? "1 run" : `${count} runs`;
}

// Makes an element; children are elements or texts, never markup.
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

function fillSelect(id, options, onchange) {
  const select = document.getElementById(id);
  select.append(...options.map(([value, text]) => element("option", { value }, text)));
  select.addEventListener("change", onchange);
  return select;
}

// Plotly takes some markup in texts; names are to be shown as they are.
function plotText(text) {
  return text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
}

// Numbers in the order of their size, before texts; what is missing comes last either way.
function compareValues(first, second, direction) {
  const missing = (value) => value === "" || value === null || value === undefined || Number.isNaN(value);
  if (missing(first) || missing(second)) return missing(first) - missing(second);
  const [a, b] = [Number(first), Number(second)];
  const numeric = !Number.isNaN(a) - !Number.isNaN(b);
  if (numeric) return -numeric * direction;
  return direction * (Number.isNaN(a) ? String(first).localeCompare(String(second), "en", { numeric: true }) : a - b);
}

const SETTING = "setting";
const SEEDS = [...new Set(DATA.runs.map((run) => run.axes[DATA.seed] ?? ""))];
const colored = { by: firstColoring() };

// What runs may be colored by: their setting, or one axis of it.
function colorings() {
  return [SETTING, ...DATA.axes.filter((name) => name !== DATA.seed)];
}

function colorValue(run, by) {
  return by === SETTING ? run.setting : run.axes[by];
}

function colorValues(by) {
  return [...new Set(DATA.runs.map((run) => colorValue(run, by)))];
}

// The one that tells most runs apart by colors that do not recur.
function firstColoring() {
  const told = (by) => (colorValues(by).length <= COLORS.length ? colorValues(by).length : 0);
  return colorings().reduce((best, by) => (told(by) > told(best) ? by : best));
}

// Colors are the same in every figure; seeds, and values beyond the colors, differ by line, mark and pattern.
function styleOf(run) {
  const place = colorValues(colored.by).indexOf(colorValue(run, colored.by));
  const variant = SEEDS.indexOf(run.axes[DATA.seed] ?? "") + Math.floor(place / COLORS.length);
  const pick = (choices) => choices[variant % choices.length];
  return { color: COLORS[place % COLORS.length], dash: pick(DASHES), symbol: pick(SYMBOLS), pattern: pick(PATTERNS) };
}

function labelOf(run) {
  const seed = DATA.seed && run.axes[DATA.seed] ? `, seed ${run.axes[DATA.seed]}` : "";
  return `${run.setting}${seed} · ${run.name}`;
}
