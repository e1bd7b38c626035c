// The page of a ring of ranks: what trace.html leaves open.
const WORD = "hop", TAP = "Tap a cell of the ring to go there.";
const stepName = i => i, stepTitle = i => `hop ${i}`;
const {cells, ranks} = DATA, world = cells.length;
const at = hop => cells[ranks[row]][hop];
const holder = (source, hop) => cells.findIndex(hops => hops[hop].source === source);
const get = (lane, key, hop = now) => hop < 0 || !steps[hop][lane][key] ? NaN : num(steps[hop][lane][key][row]);
const mark = x => Number.isFinite(x) ? "" : "bad";

document.querySelector(".lanes").classList.add("stack");
$("cards").innerHTML = `<div class="card"><div class="top"><h2>In the output, <span id="of-row"></span></h2>
    <span class="soft"><span class="exact">&#9679; exact</span> &nbsp; <span class="found">&#9679; ${escape(DATA.name)}</span></span></div>
  <p class="soft">The weight of each block of keys after the last hop. Faint: not merged yet.</p><div id="shares"></div></div>`;
$("say").insertAdjacentHTML("afterend", `<div class="card"><h2>The ring</h2><p class="soft">${escape(DATA.ring)}</p>
  <div class="wide"><table class="ring" id="ring"></table></div></div>`);

// ---- who holds what, and who sends what
function drawRing() {
  const all = world > 1 ? `<th>pairs in all</th>` : "";
  $("ring").innerHTML = `<tr><th></th>${steps.map((_, h) => `<th>hop ${h}</th>`).join("")}${all}</tr>` + cells.map((hops, rank) => {
    const first = ranks.indexOf(rank), rows = ranks.flatMap((r, i) => r === rank ? [i] : []);
    return `<tr><th>rank ${rank}</th>` + hops.map((cell, h) => {
      const sends = cell.elements ? `&rarr; rank ${holder(cell.source, h + 1)}: ${cell.elements} (${cell.bytes} B)` : "sends nothing";
      const broken = rows.some(r => isBroken(h, r));
      return `<td><button data-step="${h}" ${rank === ranks[row] || first < 0 ? "" : `data-row="${first}"`} class="${h === now ? "now" : ""} ${broken ? "broken" : ""} ${
        h === now && rank === ranks[row] ? "follow" : ""}"><b>of rank ${cell.source}</b><br>${cell.keys ? "keys " + cell.keys : "no keys"}<br>${cell.pairs} pairs<br>${sends}</button></td>`;
    }).join("") + (all && `<th>${hops.reduce((sum, cell) => sum + cell.pairs, 0)}</th>`) + "</tr>";
  }).join("");
}

// ---- one merge of one lane
function drawLane(lane) {
  const s = steps[now][lane], past = now > 0, cell = at(now), error = get(lane, "error");
  const line = (name, ...xs) => `<tr><th>${name}</th>` + xs.map(x =>
    `<td class="${x === null || x === "-inf" && name === "subtracted" ? "" : mark(num(x))}">${x === null ? "" : text(x)}</td>`).join("") + "</tr>";
  const before = key => past ? steps[now - 1][lane][key][row] : null;
  const entries = key => s[key][row].map((_, d) => d);
  $(lane).classList.toggle("broken", lane === "found" && isBroken(now, row));
  $(lane).innerHTML = `<h2 class="${lane}">${lane === "exact" ? "exact (ring)" : escape(DATA.name)}</h2>
    <h3>query ${DATA.rows[row]} on rank ${ranks[row]}, hop ${now}</h3>
    <div class="wide"><table class="merge"><tr><th></th><th>so far</th><th>keys of rank ${cell.source}</th><th>merged</th></tr>`
    + line("subtracted", before("row_max"), s.block_max[row], s.row_max[row])
    + `<tr><th>multiplied by</th>${["alpha", "beta"].map(key => `<td class="${past ? mark(get(lane, key)) : ""}"><b>${past ? text(get(lane, key)) : "–"}</b></td>`).join("")}<td></td></tr>`
    + line("row_sum", before("row_sum"), s.block_sum[row], s.row_sum[row])
    + entries("acc").map(d => line(`acc[${d}]`, past ? before("acc")[d] : null, s.block_acc[row][d], s.acc[row][d])).join("")
    + entries("out").map(d => line(DATA.columns ? escape(DATA.columns[d].replace("\n", " ")) : `out[${d}]`,
      past ? before("out")[d] : null, null, s.out[row][d])).join("")
    + `</table></div><h3>output so far, ${Number.isFinite(error) ? "off by " + text(error) : `<span class="bad">not finite</span>`}</h3>`;
}

// ---- what each block weighs in the end
function drawCards() {
  drawRing();
  $("of-row").textContent = `query ${DATA.rows[row]}`;
  const most = Math.max(1, ...["exact", "found"].flatMap(lane => finite(steps.map(s => s[lane].weight[row]))));
  const bar = (lane, x) => `<div class="state ${lane}-lane"><span class="${lane}">${lane === "exact" ? "exact" : escape(DATA.name)}</span><span class="track ${
    mark(x)}"><i style="${mark(x) ? "" : `left:0;width:${100 * clamp(x / most)}%`}"></i></span><span class="value ${mark(x)}">${text(x)}</span></div>`;
  $("shares").innerHTML = steps.map((_, h) => `<div class="share ${h <= now ? "done" : ""}"><h3>hop ${h}: rank ${at(h).source}${at(h).keys && ", keys " + at(h).keys}</h3>`
    + ["exact", "found"].map(lane => bar(lane, get(lane, "weight", h))).join("") + "</div>").join("")
    + `<h3>all weights of the row add up to <span class="exact">${text(DATA.sums.exact[row])}</span> and <span class="found">${text(DATA.sums.found[row])}</span></h3>`;
}

// ---- what happens in this hop, in words
function story() {
  const cell = at(now), rank = ranks[row], exact = steps[now].exact, found = steps[now].found, name = `<b class="found">${escape(DATA.name)}</b>`;
  const top = brief(get("exact", "row_max")), weighs = `this block weighs <b class="found">${text(get("found", "weight"))}</b>`;
  let say = `<b>Hop ${now}.</b> Rank ${rank} holds the keys of rank ${cell.source}` + (cell.keys && ` (${cell.keys})`)
    + (now ? `, which came from rank ${holder(cell.source, now - 1)}` : ", its own")
    + (cell.elements ? `, and sends them to rank ${holder(cell.source, now + 1)}: ${cell.elements} numbers, ${cell.bytes} bytes. ` : ". It is the last hop, and nothing is sent. ");
  const factors = lane => `the past by <b class="${lane}">${brief(get(lane, "alpha"))}</b> and the block by <b class="${lane}">${brief(get(lane, "beta"))}</b>`;
  const past = now > 0 && get("exact", "row_max", now - 1) > -Infinity, sees = get("exact", "block_max") > -Infinity;
  const differ = now > 0 && ["alpha", "beta"].some(key => get("exact", key) !== get("found", key));
  if (!sees) say += "The query sees none of them, so exact attention leaves the past as it is. ";
  else if (!past) say += `Their largest score is ${top}; there is no past to merge with. `;
  else say += `The larger maximum is ${top}, so exact attention multiplies the past by exp(${brief(get("exact", "row_max", now - 1))} − ${top}) = <b class="exact">${
    brief(get("exact", "alpha"))}</b> and the block by exp(${brief(get("exact", "block_max"))} − ${top}) = <b class="exact">${brief(get("exact", "beta"))}</b>. `;

  const start = DATA.breaks[row], stands = outcome(found.out[row], found.error[row]);
  if (start === now) {
    const cause = Object.keys(found.causes).find(key => found.causes[key][row]);
    say += `<b class="bad">Here ${escape(DATA.name)} breaks:</b> ` + (cause ? `${DATA.why[cause]}. The output so far is ${stands}. `
      : (past && differ ? `it multiplies ${factors("found")}, and is ` : "it is finite, plausible, and ") + `${stands}. `);
  } else if (start !== null && now > start) say += `${name} ` + (past && differ ? `multiplies ${factors("found")}. Its output so far is ` : "is ") + `${stands}. `;
  else if (past && differ) say += `${name} multiplies ${factors("found")}; its output so far is right all the same. `;
  if (sees) say += `In the end ${weighs}` + (DATA.fates[row] === "right" ? ". " : ` where <b class="exact">${text(get("exact", "weight"))}</b> is right. `);
  return say + (now === last ? ending() : "");
}
