// Draws the page of scripts/trace.py from DATA, a trace of a tile loop.
"use strict";
const DATA = /*DATA*/null;
const $ = id => document.getElementById(id);
const steps = DATA.steps, last = steps.length - 1;
// page.html#7 opens at the seventh step
let now = Math.min(last, Math.max(0, (parseInt(location.hash.slice(1)) || 1) - 1));
let row = DATA.row, timer = null;
const isBroken = (i, r) => DATA.breaks[r] !== null && i >= DATA.breaks[r];

// numbers: JSON has neither NaN nor infinity, so they come as words
const num = x => x === null ? -Infinity : typeof x === "number" ? x : x === "nan" ? NaN : x === "inf" ? Infinity : -Infinity;
function text(x) {
  x = num(x);
  if (Number.isNaN(x)) return "NaN";
  if (!Number.isFinite(x)) return x > 0 ? "inf" : "−inf";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e5 || size < 1e-3) {
    const [digits, power] = x.toExponential(1).split("e");
    return `${digits}e${+power}`.replace(/-/g, "−");
  }
  return (size >= 1000 ? x.toFixed(0) : size >= 100 ? x.toFixed(1) : x.toFixed(3)).replace("-", "−");
}
const brief = x => text(x).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
const escape = s => String(s).replace(/[&<>"]/g, c => ({"&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;"})[c]);
const finite = xs => xs.map(num).filter(Number.isFinite);
const clamp = (x, low = 0, high = 1) => Math.min(high, Math.max(low, x));

// how the followed query stands, in words
function outcome(out, error) {
  out = out.map(num);
  if (out.some(Number.isNaN)) return "NaN";
  if (out.some(x => !Number.isFinite(x))) return "infinite";
  return out.every(x => x === 0) ? "all zeros, which nothing will notice" : `off by ${text(error)}`;
}
function ending() {
  const fate = DATA.fates[row];
  if (fate === "right") return `<b class="found">${escape(DATA.name)}</b> ends where exact attention does.`;
  return `<b class="bad">This query ends as ${
    {NaN: "NaN", inf: "infinity", zero: "zeros: wrong, and nothing shows it", wrong: "a wrong number that looks like any other"}[fate]}.</b>`;
}

let shown = "scores";
document.addEventListener("click", event => {
  const at = event.target.closest("[data-show], [data-chart]");
  if (!at) return;
  if (at.dataset.show) { shown = at.dataset.show; draw(); }
  if (at.dataset.chart) {
    const box = at.getBoundingClientRect();
    stop();
    go(Math.round(clamp((event.clientX - box.left) / box.width) * last));
  }
});

// what a lane holds after a step: where it skips a tile, what it had before
function state(lane, i) {
  while (i >= 0 && !steps[i][lane]) i--;
  return i >= 0 ? steps[i][lane] : null;
}
const largest = (cells, r) => Math.max(...cells[r].map(num));
function value(lane, key, i, r) {
  const s = steps[i][lane];
  if (key === "max score") return s ? largest(s.scores, r) : -Infinity;
  if (key === "largest p") { if (!s) return 0; const p = s.p[r].map(num); return p.some(Number.isNaN) ? NaN : Math.max(...p); }
  if (key === "correction" && !s) return 1;
  const held = state(lane, i);
  return held ? num(held[{row_max: "row_max", row_sum: "row_sum", correction: "alpha", "|acc|": "acc", error: "error"}[key]][r]) : NaN;
}

// a bar's length between 0 and 1, on one scale for both lanes and all steps of a row
const LOG = new Set(["row_sum", "|acc|", "largest p", "error"]);
const scales = {};
function scale(key, r) {
  const id = key + r;
  if (scales[id]) return scales[id];
  let xs = steps.flatMap((_, i) => ["exact", "found"].map(lane => value(lane, key, i, r))).filter(Number.isFinite);
  if (key === "correction") return scales[id] = x => clamp(x);
  if (LOG.has(key)) {
    xs = xs.filter(x => x > 0).map(Math.log10);
    let low = Math.max(-12, Math.min(0, ...xs)), high = Math.max(low + 1, ...xs);
    if (key !== "error") low -= .2 * (high - low);
    return scales[id] = x => x > 0 ? clamp((Math.log10(x) - low) / (high - low)) : 0;
  }
  const low = Math.min(0, ...xs), high = Math.max(0, ...xs, low + 1e-9);
  const f = x => clamp((x - low) / (high - low));
  f.zero = f(0);
  return scales[id] = f;
}

// ---- the tile as a heat map
const narrow = () => innerWidth < 736;
const ranges = (() => {
  const all = steps.flatMap(s => ["exact", "found"].flatMap(lane => s[lane] ? s[lane].scores.flat() : [])).filter(x => typeof x === "number");
  const ps = steps.flatMap(s => ["exact", "found"].flatMap(lane => s[lane] ? s[lane].p.flat() : [])).filter(x => typeof x === "number" && x > 0);
  const fold = (xs, f, start) => xs.reduce((a, b) => f(a, b), start);
  return {low: fold(all, Math.min, Infinity), high: fold(all, Math.max, -Infinity), p: fold(ps, Math.max, 1)};
})();
function heat(lane, s) {
  const cells = s[shown], rows = cells.length, columns = cells[0].length;
  const words = rows * columns <= 64;
  // cells with a number in them are wide, the others flat: a page should show both lanes whole
  const unit = 20, w = columns * unit, tall = words ? 14 : clamp(.6 * w / rows, 3, 40), height = rows * tall;
  const letters = words ? 7 : Math.min(w / 36, tall), left = letters < w / 60 || (narrow() && !words) ? 0 : 3.6 * letters;
  let svg = "";
  for (let r = 0; r < rows; r++) for (let c = 0; c < columns; c++) {
    const x = num(cells[r][c]), masked = s.scores[r][c] === null;
    const at = `x="${left + c * unit}" y="${r * tall}" width="${unit - .8}" height="${tall - .8}" rx="1.5"`;
    if (masked) { svg += `<rect ${at} fill="none" stroke="var(--line)" stroke-width=".6" stroke-dasharray="2 2"/>`; continue; }
    const t = shown === "scores" ? (x - ranges.low) / (ranges.high - ranges.low || 1)
      : x > 0 ? (Math.log10(x) + 4) / (Math.log10(ranges.p) + 4) : 0;
    svg += Number.isFinite(x) ? `<rect ${at} fill="var(--heat)" fill-opacity="${(.05 + .9 * clamp(t)).toFixed(3)}"/>` : `<rect ${at} fill="var(--bad)"/>`;
    const label = !Number.isFinite(x) ? (Number.isNaN(x) ? "NaN" : "inf") : words ? x.toFixed(x >= 100 ? 0 : x >= 10 ? 1 : 2).replace("-", "−") : "";
    if (label) svg += `<text x="${left + c * unit + unit / 2}" y="${r * tall + tall / 2 + 2.2}" font-size="6" text-anchor="middle"`
      + (Number.isFinite(x) ? ` class="cell">${label}</text>` : ` style="fill:var(--card)">${label}</text>`);
  }
  for (let r = 0; r < rows; r++) {
    if (left) svg += `<text x="${left - .6 * letters}" y="${r * tall + tall / 2 + .35 * letters}" font-size="${letters}" text-anchor="end" opacity="${r === row ? 1 : .75}"`
      + ` font-weight="${r === row ? 700 : 400}">${DATA.rows[r]}</text>`;
    svg += `<rect class="row" data-row="${r}" x="0" y="${r * tall}" width="${left + w}" height="${tall}" fill="transparent"/>`;
  }
  svg += `<rect x="${left - 1}" y="${row * tall - 1}" width="${w + 1}" height="${tall + 1}" rx="2.5" fill="none" stroke="var(--ink)" stroke-width="2" vector-effect="non-scaling-stroke" pointer-events="none"/>`;
  const [from, to] = steps[now].keys;
  return `<svg class="heat" viewBox="-2 -2 ${left + w + 4} ${height + 4}" role="img" aria-label="${shown} of keys ${from} to ${to - 1}"`
    + ` style="max-width:${words ? 3.2 * columns + 4 : 32}rem">${svg}</svg>`;
}

// ---- one lane
const MEANING = {row_max: "subtracted", row_sum: "row_sum", correction: "correction", "|acc|": "|acc|", "largest p": "largest p"};
function bar(lane, key) {
  const x = value(lane, key, now, row), f = scale(key, row), isBad = !Number.isFinite(x) && !(key === "row_max" && x < 0);
  let style = "";
  if (!isBad && Number.isFinite(x)) {
    const t = f(x), zero = f.zero || 0;
    style = `left:${100 * Math.min(t, zero)}%;width:${Math.max(100 * Math.abs(t - zero), x === 0 ? 0 : 1)}%`;
  }
  return `<div class="state"><span>${MEANING[key]}</span><span class="track ${isBad ? "bad" : ""}"><i style="${style}"></i></span><span class="value ${isBad ? "bad" : ""}">${text(x)}</span></div>`;
}
function output(lane) {
  const truth = steps[now].reference[row].map(num), held = state(lane, now);
  const out = held ? held.out[row].map(num) : truth.map(() => 0);
  const all = steps.flatMap(s => finite(s.reference[row]));
  const low = 1.1 * Math.min(0, ...all), high = 1.1 * Math.max(0, ...all, low + 1e-9);
  const wide = narrow() ? 52 : 100, n = out.length, gap = wide / n, height = 36 * (narrow() ? .8 : 1), y = x => 3 + height * (high - clamp(x, low, high)) / (high - low);
  let svg = `<line x1="0" x2="${wide}" y1="${y(0)}" y2="${y(0)}" stroke="var(--line)" stroke-width=".4"/>`;
  out.forEach((x, d) => {
    const left = d * gap + gap * .14, width = gap * .72, middle = left + width / 2;
    if (!Number.isFinite(x)) {
      svg += `<rect x="${left}" y="3" width="${width}" height="${height}" fill="var(--bad)" opacity=".85" rx=".6"/>`;
      if (gap > 5) svg += `<text x="${middle}" y="${2 + height}" font-size="2" text-anchor="middle" style="fill:var(--card)">${text(x)}</text>`;
    } else {
      svg += `<rect x="${left}" y="${Math.min(y(x), y(0))}" width="${width}" height="${Math.max(Math.abs(y(x) - y(0)), .3)}" fill="var(--lane)" rx=".4"/>`;
      if (DATA.columns) svg += `<text x="${middle}" y="${y(0) + 4}" font-size="3.2" text-anchor="middle" font-weight="600">${text(x)}</text>`;
    }
    if (DATA.columns) DATA.columns[d].split("\n").forEach((line, i) => {
      svg += `<text x="${middle}" y="${y(0) + 7.4 + 3.1 * i}" font-size="2.6" text-anchor="middle" opacity=".7">${escape(line)}</text>`;
    });
    svg += `<line x1="${left - gap * .08}" x2="${left + width + gap * .08}" y1="${y(truth[d])}" y2="${y(truth[d])}" stroke="var(--ink)" stroke-width=".6"/>`;
  });
  return `<svg viewBox="0 0 ${wide} ${height + (DATA.columns ? 14 : 6)}" role="img" aria-label="output so far">${svg}</svg>`;
}
function drawLane(lane) {
  const s = steps[now][lane], node = $(lane), broken = lane === "found" && isBroken(now, row);
  const title = lane === "exact" ? "exact (tiled)" : escape(DATA.name);
  const [from, to] = steps[now].keys;
  node.classList.toggle("broken", broken);
  const picture = s ? heat(lane, s) : `<p class="soft">Skipped: all of it lies in the future of these queries.</p>`;
  const error = value(lane, "error", now, row);
  node.innerHTML = `<div class="top"><h2 class="${lane}">${title}</h2><span class="switch">`
    + ["scores", "p"].map(kind => `<button data-show="${kind}" aria-pressed="${kind === shown}">${kind}</button>`).join("")
    + `</span></div><h3>${shown === "scores" ? "scores" : "p = exp(score − what is subtracted)"}, keys ${from} to ${to - 1}</h3>${picture}`
    + (s ? `<p class="soft">${shown === "scores" ? brief(ranges.low) : "1e−4"}<span class="key"></span>${brief(shown === "scores" ? ranges.high : ranges.p)}</p>` : "")
    + `<h3>query ${DATA.rows[row]} after this tile</h3>${Object.keys(MEANING).map(key => bar(lane, key)).join("")}`
    + `<h3>output so far<span class="wide-only"> (line: in float64)</span>, ${Number.isFinite(error) ? "off by " + text(error) : `<span class="bad">not finite</span>`}</h3>${output(lane)}`;
}

// ---- over the tiles
const CHARTS = ["max score", "largest p", "row_sum", "correction", "|acc|", "error"];
function chart(key) {
  const w = 240, h = 92, left = 6, top = 18, bottom = 12, width = w - 2 * left, height = h - top - bottom;
  const x = i => left + (steps.length === 1 ? .5 : i / last) * width;
  const f = scale(key, row);
  const y = v => top + height * (1 - f(v));
  let svg = `<line x1="${x(now)}" x2="${x(now)}" y1="${top - 2}" y2="${top + height + 4}" stroke="var(--ink)" stroke-width="1" opacity=".35"/>`
    + `<line x1="${left}" x2="${w - left}" y1="${top + height}" y2="${top + height}" stroke="var(--line)"/>`;
  for (const lane of ["exact", "found"]) {
    const points = steps.map((_, i) => [i, value(lane, key, i, row)]);
    let path = "", pen = false;
    for (const [i, v] of points) { if (Number.isFinite(v)) { path += `${pen ? "L" : "M"}${x(i).toFixed(1)} ${y(v).toFixed(1)}`; pen = true; } else pen = false; }
    svg += `<path d="${path}" fill="none" stroke="var(--${lane})" stroke-width="${lane === "exact" ? 4 : 2}" stroke-linejoin="round" opacity="${lane === "exact" ? .45 : 1}"/>`;
    for (const [i, v] of points) {
      if (Number.isFinite(v)) { if (points.length <= 40 || i === now) svg += `<circle cx="${x(i)}" cy="${y(v)}" r="${i === now ? 3.4 : 2}" fill="var(--${lane})"/>`; }
      else if (Number.isNaN(v) || v > 0) svg += `<path d="M${x(i) - 3} ${top - 3}l6 6m0 -6l-6 6" stroke="var(--bad)" stroke-width="1.8"/>`;
    }
  }
  if (key === "max score" && DATA.limit) {
    const inside = f(DATA.limit) > 0 && f(DATA.limit) < 1;
    if (inside) svg += `<line x1="${left}" x2="${w - left}" y1="${y(DATA.limit)}" y2="${y(DATA.limit)}" stroke="var(--bad)" stroke-dasharray="3 3" opacity=".7"/>`
      + `<text x="${w - left}" y="${y(DATA.limit) + (f(DATA.limit) > .8 ? 9 : -3)}" font-size="8" text-anchor="end" class="over">exp overflows ${DATA.dtype}: ${DATA.limit.toFixed(2)}</text>`;
  }
  const figures = ["exact", "found"].map(lane => { const v = value(lane, key, now, row);
    return `<tspan style="fill:var(--${Number.isNaN(v) || v === Infinity ? "bad" : lane})">${text(v)}</tspan>`; }).join("  ");
  svg += `<text x="${left}" y="10" font-size="10">${key === "error" ? "distance from float64" : key}${LOG.has(key) ? " (log)" : ""}</text>`
    + `<text x="${w - left}" y="10" font-size="10" text-anchor="end" xml:space="preserve">${figures}</text>`;
  return `<svg viewBox="0 0 ${w} ${h}" data-chart="${key}" role="img" aria-label="${key} over the tiles">${svg}</svg>`;
}

function drawCards() {
  $("of-row").textContent = `query ${DATA.rows[row]}`;
  $("charts").innerHTML = CHARTS.map(chart).join("");
}

// ---- what happens at this step, in words
const CAUSE = {
  scores: () => "a score is not finite",
  p: (s, r) => `p = exp(${brief(largest(s.scores, r))} − ${brief(value("found", "row_max", now, r))}) passes ${text(DATA.largest)}, the largest ${DATA.dtype}`,
  row_sum: () => "the sum of p passes the largest number it can hold",
  acc: () => "p @ v passes the largest number it can hold",
  "row_sum = 0": () => "every p rounds to 0, and 0/0 is left to divide",
};
function story() {
  const s = steps[now], exact = s.exact, found = s.found, name = `<b class="found">${escape(DATA.name)}</b>`;
  const [from, to] = s.keys, where = `<b>Tile ${now + 1} of ${steps.length}</b>, keys ${from} to ${to - 1}. `;
  const before = now ? value("exact", "row_max", now - 1, row) : -Infinity;
  const alpha = value("exact", "correction", now, row), ours = value("found", "correction", now, row);
  let say = where, past = now > 0 && before > -Infinity;
  if (!exact) say += "Exact attention skips it: these keys lie in the future. ";
  else if (!exact.scores[row].some(x => x !== null)) say += "The query sees none of these keys: nothing changes. ";
  else if (!past) say += `The largest score is ${brief(value("exact", "row_max", now, row))}; there is no past to correct. `;
  else if (alpha < 1) say += `The maximum moves from ${brief(before)} to ${brief(value("exact", "row_max", now, row))}, so exact attention multiplies all it has summed by exp(${brief(before)} − ${brief(value("exact", "row_max", now, row))}) = <b class="exact">${text(alpha)}</b>. `;
  else say += `The largest score, ${brief(value("exact", "max score", now, row))}, is below the maximum so far, ${brief(before)}: the past keeps its weight. `;

  const fate = DATA.fates[row], start = DATA.breaks[row];
  const subtracts = {exact: value("exact", "row_max", now, row), found: value("found", "row_max", now, row)};
  if (start === now) {
    const cause = Object.keys(CAUSE).find(key => found.causes[key] && found.causes[key][row]);
    say += `<b class="bad">Here ${escape(DATA.name)} breaks:</b> `;
    if (cause) say += CAUSE[cause](found, row) + `. The output so far is ${outcome(state("found", now).out[row], value("found", "error", now, row))}. `;
    else if (past && exact && ours !== alpha) say += `it multiplies its past by <b class="found">${brief(ours)}</b> where <b class="exact">${text(alpha)}</b> is right, and is off by ${text(value("found", "error", now, row))}. `;
    else if (!exact) say += `it lets keys of the future in, and is off by ${text(value("found", "error", now, row))}. `;
    else if (subtracts.found !== subtracts.exact) say += `it subtracts <b class="found">${brief(subtracts.found)}</b> where <b class="exact">${brief(subtracts.exact)}</b> is right, so its largest p is ${brief(value("found", "largest p", now, row))} instead of ${brief(value("exact", "largest p", now, row))}, and it is off by ${text(value("found", "error", now, row))}. `;
    else say += `it is finite, plausible, and off by ${text(value("found", "error", now, row))}. `;
  } else if (start !== null && now > start) {
    say += fate === "wrong" ? `${name} is off by ${text(value("found", "error", now, row))}` + (past && exact && ours !== alpha ? ` (its correction here: ${brief(ours)}). ` : ". ")
      : `${name} does not recover: the output so far is ${outcome(state("found", now).out[row], value("found", "error", now, row))}. `;
  } else if (!Number.isFinite(value("found", "error", now, row))) say += `${name} has no weight yet to divide by. `;
  else if (past && exact && ours !== alpha) say += `${name} multiplies its past by ${brief(ours)}; its output so far is right all the same. `;
  if (now === last) say += ending();
  return say;
}
// ---- put together
function draw() {
  $("walk").childNodes.forEach((node, i) => {
    node.className = `${i < now ? "done" : i === now ? "now" : ""} ${isBroken(i, row) ? "broken" : ""}`;
    node.setAttribute("aria-current", i === now ? "step" : "false");
  });
  $("slider").value = now;
  $("row").value = row;
  $("back").disabled = now === 0;
  $("next").disabled = now === last;
  $("play").textContent = timer ? "pause" : "play";
  $("jump").hidden = DATA.breaks[row] === null;
  $("say").innerHTML = story();
  drawLane("exact");
  drawLane("found");
  drawCards();
}
function go(step, r = row) {
  now = clamp(step, 0, last);
  row = clamp(r, 0, DATA.rows.length - 1);
  draw();
}
function stop() { clearInterval(timer); timer = null; }
function play() {
  if (timer) { stop(); return draw(); }
  if (now === last) now = 0;
  timer = setInterval(() => { if (now >= last - 1) stop(); go(now + 1); }, 1200);
  draw();
}

$("title").textContent = document.title = `${DATA.name} in ${DATA.dtype}, tile by tile`;
$("headline").textContent = DATA.headline;
$("verdict").textContent = DATA.verdict;
$("verdict").classList.toggle("broken", DATA.fates.some(fate => fate !== "right"));
$("defect").textContent = DATA.defect ? `${DATA.name} is wrong on purpose: ${DATA.defect}.` : "";
$("command").textContent = DATA.command;
$("of-found").textContent = `● ${DATA.name}`;
$("slider").max = last;
if (steps.length > 64) $("walk").style.gap = 0;
$("walk").innerHTML = steps.map((s, i) => `<button data-step="${i}" title="keys ${s.keys[0]} to ${s.keys[1] - 1}">${steps.length <= 32 ? i + 1 : ""}</button>`).join("");
$("row").innerHTML = DATA.rows.map((name, r) => `<option value="${r}">${name}${DATA.fates[r] === "right" ? "" : " (" + DATA.fates[r] + ")"}</option>`).join("");

$("back").onclick = () => { stop(); go(now - 1); };
$("next").onclick = () => { stop(); go(now + 1); };
$("play").onclick = play;
$("jump").onclick = () => { stop(); go(DATA.breaks[row]); };
$("slider").oninput = event => { stop(); go(+event.target.value); };
$("row").onchange = event => go(now, +event.target.value);
document.addEventListener("click", event => {
  const at = event.target.closest("[data-step], [data-row]");
  if (!at) return;
  if (at.dataset.step) { stop(); go(+at.dataset.step); }
  if (at.dataset.row) go(now, +at.dataset.row);
});
document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("select, input")) return;
  const move = {ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-now, 0], End: [last - now, 0]}[event.key];
  if (event.key === " " && !event.target.closest("button")) { event.preventDefault(); play(); }
  if (!move) return;
  event.preventDefault();
  stop();
  go(now + move[0], row + move[1]);
});
addEventListener("resize", draw);
draw();
