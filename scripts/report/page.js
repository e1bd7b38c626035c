const all = (selector) => [...document.querySelectorAll(selector)];
const only = (selector) => document.querySelector(selector);
const dark = matchMedia("(prefers-color-scheme: dark)");
const rows = all(".sortable tbody tr");
const variants = [...new Set(rows.map((row) => row.dataset.variant))];
const hidden = new Set();
const zooms = new Map(); // by length: its tokens, and the values of each kind of chart
let focus = null; // the variant under the pointer
let charts = [];

// What fails is told to the reader, and to tests: a chart that is missing may be a finding.
function fail(why) {
  const box = only("#failed");
  box.hidden = false;
  box.append(`A chart could not be drawn: ${why}. `);
}
addEventListener("error", (event) => fail(event.message));
addEventListener("unhandledrejection", (event) => fail(event.reason));
addEventListener("securitypolicyviolation", (event) => fail(`policy: ${event.violatedDirective}`));

// A colour of the page under the colour scheme of now.
function color(value) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = value;
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

function theme() {
  const rowOf = (variant) => rows.find((row) => row.dataset.variant === variant);
  const colorOf = (variant) => getComputedStyle(rowOf(variant).querySelector("svg")).stroke;
  const [soft, grid] = [color("var(--soft)"), color("var(--line)")];
  const text = { labelColor: soft, titleColor: soft, labelFontSize: 11.5 };
  return {
    background: color("var(--paper)"), // not transparent: saved pictures would be unreadable
    font: getComputedStyle(document.body).fontFamily,
    view: { stroke: null },
    padding: { left: 4, right: 12, top: 12, bottom: 4 }, // crosses stand on the edges
    axis: { ...text, gridColor: grid, domain: false, ticks: false, labelPadding: 8 },
    axisX: { grid: false, tickCount: 5, title: null, titleFontWeight: "normal" },
    axisY: { tickCount: 6, title: null },
    axisQuantitative: { labelOverlap: "greedy", labelSeparation: 6 },
    text: { color: soft, fontSize: 11.5 },
    rule: { color: soft },
    range: { category: variants.map(colorOf) },
  };
}

const logger = {
  level: (level) => (level === undefined ? 2 : logger),
  error: (...words) => fail(words.join(" ")),
  warn: (...words) => fail(words.join(" ")),
  info: () => logger,
  debug: () => logger,
};

// A row for each point of a curve. Vega writes into rows, so each drawing has its own.
function spread(rows) {
  return rows.flatMap((row) => {
    const names = Object.keys(row).filter((name) => Array.isArray(row[name]));
    const point = (i) => Object.fromEntries(names.map((name) => [name, row[name][i]]));
    return names.length ? row.tokens.map((_, i) => ({ ...row, ...point(i) })) : { ...row };
  });
}

async function draw() {
  for (const { view } of charts) view.finalize();
  charts = [];
  const config = theme();
  for (const [number, box] of all("[data-chart]").entries()) {
    const chart = { box, ...specs[number].usermeta };
    const spec = structuredClone(specs[number]);
    for (const [name, rows] of Object.entries(spec.datasets)) spec.datasets[name] = spread(rows);
    const drawn = await vegaEmbed(box, spec, {
      config,
      renderer: "canvas", // thousands of points wait for the pointer
      ast: true, // no eval: the page's own policy forbids it
      tooltip: (_, event, item, value) => showTip(event, rowNear(event, item, chart) && value),
      logger,
      downloadFileName: specs[number].description,
      actions: { export: true, source: false, compiled: false, editor: false },
    });
    chart.view = drawn.view;
    charts.push(chart);
    chart.view.signal("hidden", [...hidden]);
    await chart.view.runAsync();
    listen(chart);
    if (chart.kind) zoomTo(chart);
  }
  document.body.dataset.drawn = charts.length;
}

function listen(chart) {
  const { view } = chart;
  const point = (event, item) => setFocus(rowNear(event, item, chart)?.variant ?? null);
  view.addEventListener("pointermove", point);
  view.addEventListener("pointerout", () => setFocus(null));
  // a finger does not move before it taps, and a click knows only what a pointer has moved over
  view.addEventListener("touchstart", ({ changedTouches: [touch] }, item) => {
    point(touch, item);
    showTip(touch, rowNear(touch, item, chart) && item.tooltip);
  });
  if (chart.kind) view.addSignalListener("zoom", (_, range) => zoomed(chart, range));
}

// The row under the pointer. Between points, the item is the cell of the nearest one, however far.
function rowNear(event, item, { view, box }) {
  if (!item?.isVoronoi) return item?.datum;
  const area = box.querySelector("canvas").getBoundingClientRect();
  const [left, top] = view.origin();
  const { x, y, datum } = item.datum;
  const [across, down] = [event.clientX - area.x - left - x, event.clientY - area.y - top - y];
  return Math.hypot(across, down) < 40 ? datum : null;
}

function showTip(event, value) {
  const tip = only(".tip");
  tip.hidden = !value;
  if (!value) return;
  const cell = (tag, textContent) => Object.assign(document.createElement(tag), { textContent });
  const pairs = Object.entries(value).filter(([, text]) => text && text !== "undefined");
  tip.replaceChildren(...pairs.flatMap(([name, text]) => [cell("dt", name), cell("dd", text)]));
  const beside = (at, size, most) => Math.max(8, at + 16 + size > most ? at - size - 16 : at + 16);
  tip.style.left = `${beside(event.clientX, tip.offsetWidth, innerWidth - 8)}px`;
  tip.style.top = `${beside(event.clientY, tip.offsetHeight, innerHeight - 8)}px`;
}

function send(name, value) {
  for (const { view } of charts) view.signal(name, value).runAsync();
}

function setFocus(variant) {
  if (variant === focus) return;
  focus = variant;
  send("focus", focus);
  for (const row of rows) row.classList.toggle("in-focus", row.dataset.variant === focus);
}

function setHidden(names) {
  hidden.clear();
  for (const name of names) hidden.add(name);
  send("hidden", [...hidden]);
  for (const button of all(".variant")) {
    const off = hidden.has(button.dataset.variant);
    button.setAttribute("aria-pressed", !off);
    (button.closest("tr") ?? button).classList.toggle("is-hidden", off);
  }
  only(".all").hidden = hidden.size === 0;
}

// Both axes in one run: Vega-Lite drops a range of which it knows one axis.
async function zoomTo(chart) {
  const zoom = zooms.get(chart.seq_len);
  const values = zoom && (zoom[chart.kind] ?? chart.view.scale("y").domain());
  chart.follows = true;
  chart.view.signal("zoom_tokens", zoom?.tokens ?? null).signal("zoom_value", values ?? null);
  await chart.view.runAsync();
  chart.follows = false;
}

// Charts of one length follow the one that was dragged.
function zoomed(chart, range) {
  if (chart.follows) return;
  const before = zooms.get(chart.seq_len);
  if (range?.tokens) {
    zooms.set(chart.seq_len, { ...before, tokens: range.tokens, [chart.kind]: range.value });
  } else zooms.delete(chart.seq_len);
  for (const other of charts) {
    if (other !== chart && other.kind && other.seq_len === chart.seq_len) zoomTo(other);
  }
  press(zooms.size ? null : "whole");
}

function press(view) {
  for (const button of all("[data-view]")) {
    button.setAttribute("aria-pressed", button.dataset.view === view);
  }
}

// The half in which many variants come apart.
function zoomToLastHalf() {
  for (const { usermeta, datasets } of specs) {
    const { kind, seq_len: length } = usermeta;
    const curves = (datasets.points ?? []).filter((row) => !hidden.has(row.variant));
    const last = Math.max(...curves.map((row) => row.tokens.at(-1)));
    const isLate = (row) => (_, i) => row.tokens[i] >= last / 2;
    const late = curves.flatMap((row) => row.value.filter(isLate(row)));
    if (late.length === 0) continue;
    const zoom = zooms.get(length) ?? {};
    const values = late.concat(zoom[kind] ?? []);
    const ends = [Math.min(...values), Math.max(...values)];
    zooms.set(length, { ...zoom, tokens: [last / 2, last * 1.01], [kind]: ends });
  }
}

function show(view) {
  zooms.clear();
  if (view === "late") zoomToLastHalf();
  for (const chart of charts) if (chart.kind) zoomTo(chart);
  press(view);
}

function sort(head) {
  const heads = [...head.parentElement.cells];
  const up = head.getAttribute("aria-sort") !== "ascending";
  for (const other of heads) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = (row) => row.cells[head.cellIndex].textContent;
  const number = (row) => parseFloat(value(row).replaceAll(",", ""));
  const compare = (a, b) => {
    const [x, y] = [number(a), number(b)];
    if (Number.isNaN(x) || Number.isNaN(y)) {
      return Number.isNaN(x) - Number.isNaN(y) || value(a).localeCompare(value(b));
    }
    return up ? x - y : y - x;
  };
  rows[0].parentElement.append(...[...rows].sort(compare));
}

const specs = all("[data-chart] script").map((script) => JSON.parse(script.textContent));
for (const button of all(".variant")) {
  const name = button.dataset.variant;
  const without = (names) => [...names].filter((each) => each !== name);
  button.addEventListener("click", () => {
    setHidden(hidden.has(name) ? without(hidden) : [...hidden, name]);
  });
  button.addEventListener("dblclick", () => setHidden(without(variants)));
  button.addEventListener("pointerenter", () => setFocus(name));
  button.addEventListener("pointerleave", () => setFocus(null));
}
for (const button of all("[data-view]")) {
  button.addEventListener("click", () => show(button.dataset.view));
}
for (const head of all(".sortable thead th")) {
  head.querySelector("button").addEventListener("click", () => sort(head));
}
only(".all").addEventListener("click", () => setHidden([]));
dark.addEventListener("change", draw);
// Vega's script comes after this one
addEventListener("DOMContentLoaded", draw);
