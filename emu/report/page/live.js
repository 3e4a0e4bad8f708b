"use strict";
// The live page. Figures come over /emu/events: each second a snapshot ("state") and a point of the
// trends, and what happens. Only what has changed is written into the page, and charts, which cost
// most, are drawn again when their curves have moved.
const $ = (id) => document.getElementById(id);
const facts = JSON.parse($("facts").textContent);
const token = new URLSearchParams(location.search).get("token") || "";
const DENSE_FROM = 33;
const POINTS_MAX = 4000;  // then the server, which thins what is old, is asked for all of them again
const SHOWN_FIRST = 600;
const MOVES_SHOWN = 150;  // of a chart's width: less than such a part is not worth drawing it again
const REST_MS = 3000;
const WATCHED_MS = 60000;  // a page that nobody has touched for so long draws half as often
const COLORS = {
  inactive: "#9aa4b2", failed: "#dc2626", prefill: "#2563eb", new_prefill: "#38bdf8", refractory_prefill: "#0891b2",
  old_prefill: "#1e40af", aus_prefill: "#60a5fa", decode: "#16a34a", mutating_to_decode: "#65a30d", aus_decode: "#4ade80",
  colocated: "#7c3aed", loading: "#d97706", draining: "#a16207", spare: "#64748b",
};
const kindOf = (state) => COLORS[state] ? state : state.startsWith("shutting") ? "draining" : state.startsWith("loading") ? "loading" : "spare";
const color = (state) => COLORS[kindOf(state)];
let touchedMs = Date.now();
for (const kind of ["pointermove", "pointerdown", "keydown", "wheel"]) addEventListener(kind, () => { touchedMs = Date.now(); }, { passive: true });
const restMs = () => Date.now() < touchedMs + WATCHED_MS ? REST_MS : 2 * REST_MS + 1000;
let goals = "", chosen = 0, last = null, points = [], marks = [];
const round = (v) => v === null || v === undefined ? "-" : v >= 100 ? Math.round(v).toLocaleString("en") : Number(v.toPrecision(3)).toString();
const escaped = (text) => String(text).replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);

// Writes a text or some HTML only if it is another one.
const written = new Map();
function put(id, text, asHtml) {
  if (written.get(id) === text) return;
  written.set(id, text);
  if (asHtml) $(id).innerHTML = text; else $(id).textContent = text;
}

function bytes(n) {
  const units = ["B", "kB", "MB", "GB", "TB", "PB"];
  let i = 0;
  while (n >= 1000 && i < 5) { n /= 1000; i += 1; }
  return (i ? n.toFixed(1) : n) + " " + units[i];
}

// --- snapshots ---------------------------------------------------------------------------------
function onState(s) {
  const sum = (f) => s.replicas.reduce((a, r) => a + f(r), 0);
  const used = sum((r) => r.blocks_used), total = sum((r) => r.blocks_total);
  last = s;
  if (document.hidden) return;
  put("model", s.model); put("speed", String(s.speed)); put("time", s.at_s.toFixed(1));
  put("status", s.is_draining ? "draining" : s.is_ready ? "ready" : "starting, " + s.startup_left_s.toFixed(1) + " s");
  const pace = s.pace;
  $("pace").className = pace.verdict === "late" ? "bad" : "";
  honest(pace.recent_verdict);
  put("pace", pace.verdict === "late"
    ? `LOST: ${pace.late} of ${pace.requests} answers late since ${pace.first_late_s.toFixed(1)} s, worst ${(pace.worst_s * 1e3).toFixed(0)} ms`
    : pace.verdict);
  put("drift", (s.drift_s * 1e3).toFixed(1)); put("lag", (s.loop_lag_s * 1e3).toFixed(1));
  put("outstanding", String(s.outstanding)); put("held", String(s.held));
  put("kv", (100 * used / (total || 1)).toFixed(1) + " %");
  put("blocks", used.toLocaleString("en") + " of " + total.toLocaleString("en"));
  put("flows", Object.entries(s.flows).filter(([, n]) => n).map(([k, n]) => n + " " + k).join(", ") || "0");
  $("moving").hidden = !facts.is_disaggregated && !Object.values(s.moved_bytes).some(Boolean);
  put("moved", Object.entries(s.moved_bytes).filter(([, n]) => n).map(([k, n]) => bytes(n) + " " + k).join(", ") || "nothing moved");
  replicas(s.replicas);
  put("latencies", Object.entries(s.latencies).map(([name, q]) =>
    `<tr><td>${name.replace("_ms", "").toUpperCase()}</td><td>${round(q.p50)}</td><td>${round(q.p90)}</td><td>${round(q.p99)}</td></tr>`).join(""), true);
  put("ended", Object.entries(s.ended).map(([k, n]) => n + " " + k).join(", ")
    + (s.faults ? `, ${s.faults} fault${s.faults > 1 ? "s" : ""}` : "") + (s.failures_returned ? `, ${s.failures_returned} failures returned` : ""));
  planner(s.planner); pairs(s.pairs); forces(s.faults_in_force, s.at_s);
  $("s-forces").hidden = !s.faults_in_force.length && !s.pairs.length;
}

const dense = facts.replicas >= DENSE_FROM;
function makeReplicas() {
  const box = $("replicas");
  box.classList.toggle("dense", dense);
  while (box.children.length < facts.replicas) {
    const card = document.createElement("button"), id = box.children.length;
    card.className = "replica"; card.type = "button";
    card.innerHTML = dense ? String(id)
      : `<b><span>${id}</span><span class="name"></span></b><div class="soft"></div><div class="meter"><i></i></div>`;
    card.onclick = () => { chosen = id; replicas(last.replicas, true); commands(true); };
    card.onpointerenter = () => { if (last) card.title = told(last.replicas[id]); };
    box.append(card);
  }
}
makeReplicas();

const told = (r) => `replica ${r.id}${port(r)}: ${r.state}, ${r.running} running, ${r.waiting} waiting, KV ${(100 * r.blocks_used / (r.blocks_total || 1)).toFixed(1)} %, `
  + `${r.gpus} GPU${r.gpus > 1 ? "s" : ""} of machine ${r.machine}` + (r.slowdown !== 1 ? `, iterations take ${+r.slowdown.toPrecision(3)} times as long` : "");

function replicas(list, now) {
  const counts = {};
  for (const r of list) counts[r.state] = (counts[r.state] || 0) + 1;
  put("legend", Object.keys(counts).sort().map((n) => `<span><i style="background:${color(n)}"></i>${counts[n]} ${n}</span>`).join(""), true);
  if (!counted && document.activeElement !== $("count")) $("count").value = serving();
  commands(false);
  const states = dense ? list.map((r) => r.state).join() : "";
  if (now || !dense || states !== shaded || (Date.now() >= shadedMs + restMs() + 900 && isSeen($("replicas")))) shade(list);
  shaded = states;
}

// Hundreds of tiles are shaded as often as charts are drawn, while they are on the screen, and when
// a state changes.
let shadedMs = 0, shaded = "";
const isSeen = (part) => { const at = part.getBoundingClientRect(); return at.bottom > 0 && at.top < innerHeight; };
function shade(list) {
  shadedMs = Date.now();
  const box = $("replicas");
  const by = $("shade").value;
  const value = (r) => by === "kv" ? 100 * r.blocks_used / (r.blocks_total || 1) : r[by];
  const top = Math.max(...list.map(value));  // shades are relative, or a quiet cluster looks all the same
  put("top", top ? `full: ${by === "kv" ? round(top) + " % of the KV" : top + " " + by}` : "");
  arrange(list);
  for (const r of list) {
    const part = top ? Math.round(10 * value(r) / top) * 10 : 0;  // steps that an eye can tell apart
    const key = [r.state, part, r.id === chosen, ...(dense ? [] : [r.running, r.waiting, r.slowdown])].join();
    const card = box.children[r.id];
    if (card.shown === key) continue;
    card.shown = key;
    card.style.setProperty("--state", color(r.state));
    card.classList.toggle("chosen", r.id === chosen);
    if (dense) { card.style.setProperty("--part", part + "%"); continue; }
    const [title, text, meter] = card.children;
    const factor = +r.slowdown.toPrecision(3);
    title.children[0].textContent = r.id + (facts.ports.length ? " :" + facts.ports[r.id] : "") + (factor !== 1 ? ` (${factor}x)` : "");
    title.children[1].textContent = r.state;
    text.textContent = `${r.running} running, ${r.waiting} waiting`;
    meter.firstChild.style.width = part + "%";
  }
}
const port = (r) => facts.ports.length ? ` on port ${facts.ports[r.id]} (${["inactive", "failed"].includes(r.state) ? "refuses" : "listens"})` : "";

// The worst stand first in their group; the order changes every five seconds at most, of tiles every
// ten.
const GROUPS = ["failed", "colocated", "prefill", "decode", "loading", "draining", "spare", "inactive"];
const badness = (r) => (r.state === "failed" ? 1e9 : 0) + (r.slowdown > 1 ? 1e6 * r.slowdown : 0) + 1e3 * r.waiting + 100 * r.blocks_used / (r.blocks_total || 1);
const heads = new Map();
let arranged = 0, counted = false;
function arrange(list) {
  if (Date.now() < arranged + (dense ? 10000 : 5000)) return;
  arranged = Date.now();
  const by = $("group").value, groups = new Map();
  for (const r of [...list].sort((a, b) => badness(b) - badness(a) || a.id - b.id)) {
    const key = by === "role" ? roleOf(r.state) || kindOf(r.state) : by === "machine" ? "machine " + r.machine : "";
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(r);
  }
  const place = (key) => by === "role" ? GROUPS.indexOf(key) : 0;
  let order = 0;
  for (const head of heads.values()) head.hidden = true;
  for (const [key, members] of [...groups].sort(([a], [b]) => place(a) - place(b))) {
    if (key) heading(key, order, members);
    order += 1;
    for (const r of members) {
      const place = String(order++), style = $("replicas").children[r.id].style;
      if (style.order !== place) style.order = place;
    }
  }
}
function heading(key, order, members) {
  if (!heads.has(key)) {
    heads.set(key, document.createElement("div"));
    heads.get(key).className = "group";
    $("replicas").append(heads.get(key));
  }
  const head = heads.get(key), sum = (name) => members.reduce((a, r) => a + r[name], 0);
  head.hidden = false;
  head.style.order = String(order);
  head.innerHTML = `<b>${key}</b> <span class="soft">${members.length}; ${sum("running")} running, ${sum("waiting")} waiting</span>`;
}

let offered = "";
function commands(force) {
  const r = last && last.replicas[chosen] || { commands: [] };
  put("chosen", "of replica " + chosen);
  const key = chosen + r.commands.join();
  if (key === offered && !force) return;
  offered = key;
  $("command").innerHTML = r.commands.map((c) => `<option>${c}</option>`).join("");
}

function planner(p) {
  $("h-planner").hidden = $("planner").hidden = !p;
  if (!p) return;
  const row = (name, value) => `<tr><td>${name}</td><td>${value}</td></tr>`;
  const wanted = Object.entries(p.wanted).filter(([, v]) => v).map(([k, v]) => `${escaped(k)} ${["prefill", "decode", "colocated"].includes(k) && v > 0 ? "+" : ""}${round(v)}`).join(", ");
  put("planner", "<table class=facts>" + row("planner", escaped(p.name)) + row("sees waiting", `${p.waiting_requests} requests, ${p.waiting_tokens.toLocaleString("en")} tokens`)
    + row("sees in migration", `${p.tokens_in_migration.toLocaleString("en")} tokens`)
    + row("wants", wanted || "no change") + row("scaled up, down", `${p.scale_ups}, ${p.scale_downs}`)
    + row("looked", `${p.looks} times, last at ${p.looked_s.toFixed(2)} s`) + "</table>", true);
}

function pairs(list) {
  if (!list.length) { put("pairs", `<p class="soft">${facts.is_disaggregated ? "none yet" : "no replica hands KV to another"}</p>`, true); return; }
  const top = list[0][2];
  put("pairs", "<table>" + list.map(([a, b, n]) =>
    `<tr><td>${a} &rarr; ${b}</td><td style="width:60%"><div class="ground"><i style="width:${(100 * n / top).toFixed(0)}%"></i></div></td><td>${bytes(n)}</td></tr>`).join("") + "</table>", true);
}

function forces(list, now) {
  put("forces", list.length ? "<table>" + list.map((f) =>
    `<tr><td>${escaped(f.kind)} ${escaped(f.target)}</td><td>${f.until_s === null ? "for good" : Math.max(0, f.until_s - now).toFixed(0) + " s left"}</td>`
    + `<td><button type="button" data-undo="${f.number}">end now</button></td></tr>`).join("") + "</table>" : '<p class="soft">none</p>', true);
}
$("forces").onclick = (e) => {
  const number = e.target.dataset && e.target.dataset.undo;
  if (number !== undefined) send("DELETE", "faults/" + number, null, (r) => `${r.kind} is over`);
};

// What clients saw of the last half minute, where this machine made them wait.
function honest(verdict) {
  const isLate = verdict === "late";
  const at = points.filter((p) => p.seen_ttft_p50_ms !== null && p.ttft_p50_ms !== null).slice(-1)[0];
  $("met").className = isLate ? "bad" : "";
  $("goals").className = isLate ? "bad" : "";
  put("goals", isLate && at
    ? `clients ${seconds(at.seen_ttft_p50_ms)}, cluster ${seconds(at.ttft_p50_ms)}`
    : goals);
}
const seconds = (ms) => ms >= 1000 ? (ms / 1e3).toPrecision(2) + " s" : round(ms) + " ms";

// --- trends ------------------------------------------------------------------------------------
function onPoint(p) {
  if (points.length && p.at_s <= points[points.length - 1].at_s) return; // the history has it
  points.push(p);
  if (points.length > POINTS_MAX) reload();
  while (marks.length && points.length && marks[0].x < points[0].at_s) marks.shift();
  if (!document.hidden) { figures(); drawMoved(); }
}

let drawnAt = 0, drawnMs = 0;
function drawMoved() {
  const { low, high } = spanShown(), moved = points[points.length - 1].at_s - drawnAt;
  if (moved >= (high - low) / MOVES_SHOWN && Date.now() >= drawnMs + restMs() - 100) drawTrends();
}

// What the charts show: the last points (0: all), or a time that was chosen with the brush.
let shownLast = SHOWN_FIRST, chosenSpan = null;
function spanShown() {
  if (chosenSpan) return chosenSpan;
  const first = points[shownLast ? Math.max(0, points.length - shownLast) : 0];
  return { low: first.at_s, high: Math.max(points[points.length - 1].at_s, first.at_s + 1) };
}
function choose(low, high) {
  chosenSpan = { low: Math.max(low, points[0].at_s), high: Math.min(high, points[points.length - 1].at_s) };
  if (chosenSpan.high - chosenSpan.low < 1) chosenSpan.high = chosenSpan.low + 1;
  drawTrends();
}
$("range").onclick = (e) => {
  const { last: count, zoom } = e.target.dataset || {};
  if (!points.length) return;
  if (count !== undefined) { shownLast = Number(count); chosenSpan = null; drawTrends(); }
  if (zoom === undefined) return;
  const { low, high } = spanShown(), middle = (low + high) / 2, half = Number(zoom) * (high - low) / 2;
  choose(middle - half, middle + half);
};
for (const place of document.querySelectorAll(".brushed")) {
  let from = null, box = null;
  const at = (e) => e.clientX - place.getBoundingClientRect().left;
  place.addEventListener("pointerdown", (e) => { if (e.button === 0 && points.length) from = at(e); });
  place.addEventListener("pointermove", (e) => {
    if (from === null || (!box && Math.abs(at(e) - from) < 8)) return;
    if (!box) { box = document.createElement("div"); box.className = "brush"; place.append(box); place.setPointerCapture(e.pointerId); }
    box.style.left = Math.min(from, at(e)) + "px"; box.style.width = Math.abs(at(e) - from) + "px";
  });
  const end = (e) => {
    const wasBrushed = box !== null && e.type === "pointerup", ends = [from, at(e)].sort((a, b) => a - b);
    if (box) box.remove();
    from = box = null;
    if (wasBrushed) choose(...ends.map((pixels) => emuCharts.valueAt(place.id, pixels)));
  };
  place.addEventListener("pointerup", end);
  place.addEventListener("pointercancel", end);
  place.addEventListener("dblclick", () => { chosenSpan = null; drawTrends(); });
}

function figures() {
  const now = points[points.length - 1];
  const known = points.slice(-30).filter((p) => p.met_percent !== null && p.ended);
  const count = known.reduce((a, p) => a + p.ended, 0);
  put("met", count ? (known.reduce((a, p) => a + p.met_percent * p.ended, 0) / count).toFixed(1) + " %" : "-");
  put("decode", round(now.decode_tokens_per_s)); put("prefill", round(now.prefill_tokens_per_s));
}

function drawTrends() {
  if (!points.length) return;
  drawnAt = points[points.length - 1].at_s; drawnMs = Date.now();
  figures();
  const span = { unit: "s", ...spanShown() }, every = points;
  drawSpan(span, every.filter((p, i) => (every[i + 1] || p).at_s >= span.low && (every[i - 1] || p).at_s <= span.high));
  put("shown", `${span.low.toFixed(0)} to ${span.high.toFixed(0)} s` + (chosenSpan ? " (double click: back to now)" : ""));
  for (const button of $("range").querySelectorAll("[data-last]")) button.setAttribute("aria-pressed", String(!chosenSpan && Number(button.dataset.last) === shownLast));
}

function drawSpan(span, points) {
  const x = points.map((p) => p.at_s), of = (key, scale) => points.map((p) => p[key] === null || p[key] === undefined ? null : p[key] * (scale || 1));
  const line = (name, key, color, more) => ({ name, color, x, y: of(key, more && more.scale), ...more });
  const chart = (id, series, more) => {
    // What is not on the screen is drawn when it comes there.
    if (isSeen($(id))) emuCharts.draw({ id, legend: true, marks: marks.filter((m) => m.x >= span.low && m.x <= span.high), x: span, y: { low: 0 }, series, ...more });
  };
  for (const name of ["ttft", "tpot"]) {
    const hasClients = name === "ttft" && points.some((p) => p.seen_ttft_p50_ms > 1.1 * p.ttft_p50_ms + 5);
    const goal = facts.slo[name + "_ms"], top = Math.max(0, ...of(`${name}_p99_ms`), ...(hasClients ? of("seen_ttft_p99_ms") : []));
    // The axis reaches up to the objective unless that would flatten the curves.
    const low = { low: 0, high: goal && goal >= top && goal < 4 * top ? goal * 1.1 : undefined };
    const lines = [line("p50", `${name}_p50_ms`, "#0072b2"), line("p95", `${name}_p95_ms`, "#e69f00"), line("p99", `${name}_p99_ms`, "#d55e00")];
    if (hasClients) lines.push(line("clients, p50", "seen_ttft_p50_ms", "#dc2626", { dash: true }), line("clients, p99", "seen_ttft_p99_ms", "#a21caf", { dash: true }));
    chart("c-" + name, lines,
      { y: low, limits: goal && goal < 4 * top ? [{ axis: "y", value: goal, text: "objective" }] : [] });
  }
  const roles = [...new Set(points.flatMap((p) => Object.keys(p.roles)))].sort().filter((role) => role !== "inactive");
  chart("c-roles", roles.map((role) => ({ name: role, color: COLORS[role] || "#64748b", x, y: points.map((p) => p.roles[role] || 0), shape: "after", area: true })));
  chart("c-load", [line("running", "running", "#009e73"), line("waiting", "waiting", "#d55e00")]);
  chart("c-tokens", [line("output", "decode_tokens_per_s", "#0072b2"), line("prompt", "prefill_tokens_per_s", "#cc79a7", { right: true })], { y2: { low: 0 } });
  chart("c-kv", [line("KV in use", "kv_percent", "#8c6d1f"), line("KV moved", "kv_bytes_per_s", "#0072b2", { right: true, scale: 1e-9 }),
    line("weights moved", "weights_bytes_per_s", "#e69f00", { right: true, scale: 1e-9 })], { y: { low: 0, unit: "%" }, y2: { low: 0, unit: "GB/s" } });
}

// --- what happens ------------------------------------------------------------------------------
function log(text, kind) {
  const line = document.createElement("div");
  line.className = kind; line.textContent = text;
  $("log").prepend(line);
  while ($("log").children.length > 200) $("log").lastChild.remove();
}
const MARKS = { fault: "#d55e00", fault_over: "#009e73", plan: "#cc79a7", command: "#cc79a7" };
function onEvent(e) {
  if (e.event === "state") { onState(e); return; }
  if (e.event === "point") { onPoint(e); return; }
  const at = e.at_s.toFixed(2) + " s  ";
  let text = `${e.event.replace("_", " ")} ${e.kind || e.text || e.speed} ${e.target || ""}`;
  if (e.event === "transition") text = `replica ${e.replica}: ${e.from} → ${e.to} (${e.cause})`;
  else if (e.event === "note") text = `${e.kind} ${e.target} ${e.text}`;
  log(at + text, e.event);
  const color = MARKS[e.event] || MARKS[e.kind];
  if (color && e.event !== "transition") marks.push({ x: e.at_s, color, text });
  if (marks.length > 200) marks.shift();
}

// --- requests ----------------------------------------------------------------------------------
async function look(path) {
  const answer = await fetch("emu/" + path, { headers: { "x-emu-token": token } });
  const got = await answer.json();
  if (!answer.ok) { say(got.error.message, true); return null; }
  return got;
}
const SPANS = [["queued", "#9aa4b2"], ["prefill", "#2563eb"], ["between replicas", "#e69f00"], ["decode", "#16a34a"]];
function stages(r) {
  const end = r.last_token_s, first = r.first_token_s, begun = r.first_scheduled_s;
  if (begun === null || first === null || end === null) return [];
  const moved = Math.min(r.migration_ms / 1e3, end - first);
  return [begun - r.arrival_s, first - begun, moved, end - first - moved];
}
async function list() {
  const got = await look("requests");
  if (!got) return;
  const row = (r) => `<tr data-id="${r.id}"><td>${r.id}</td><td>${r.status === "queued" && r.first_token_s !== null ? "running" : r.status}</td><td>${r.prompt_tokens}</td><td>${r.generated_tokens}</td>`
    + `<td>${r.first_token_s === null ? "-" : round((r.first_token_s - r.arrival_s) * 1e3)}</td></tr>`;
  const table = (title, rows) => `<table><thead><tr><th>${title}</th><th></th><th>prompt</th><th>output</th><th>TTFT, ms</th></tr></thead><tbody>${rows.map(row).join("")}</tbody></table>`;
  $("list").innerHTML = table("slowest", got.slowest) + table("oldest under way", got.under_way);
}
async function inspect(id) {
  const r = await look("requests/" + id);
  if (!r) return;
  const spans = stages(r), whole = spans.reduce((a, b) => a + b, 0) || 1;
  const bar = spans.length ? `<div class="gantt">${spans.map((s, i) => `<i style="width:${100 * s / whole}%;background:${SPANS[i][1]}" title="${SPANS[i][0]} ${round(s * 1e3)} ms"></i>`).join("")}</div>`
    + `<p class="soft">${spans.map((s, i) => `<i style="background:${SPANS[i][1]};display:inline-block;width:9px;height:9px;border-radius:2px"></i> ${SPANS[i][0]} ${round(s * 1e3)} ms`).join(" &nbsp; ")}</p>` : "";
  $("detail").hidden = false;
  $("detail").innerHTML = `<b>Request ${r.id}</b>, ${escaped(r.status)} ${escaped(r.reason)}${bar}<dl>`
    + Object.entries(r).filter(([k, v]) => !["id", "status", "reason"].includes(k) && v !== "" && v !== null)
      .map(([k, v]) => `<dt class="soft">${k.replace(/_/g, " ")}</dt><dd>${escaped(v)}</dd>`).join("") + "</dl>";
  $("number").value = r.id;
}
$("refresh").onclick = list;
$("list").onclick = (e) => { const row = e.target.closest("tr[data-id]"); if (row) inspect(row.dataset.id); };
$("inspect").onsubmit = (e) => { e.preventDefault(); if ($("number").value !== "") inspect($("number").value); };

// --- control -----------------------------------------------------------------------------------
function say(text, isBad) { $("message").className = isBad ? "bad" : ""; put("message", text); }
async function send(method, path, body, done) {
  try {
    const answer = await fetch("emu/" + path, { method, body: body === null ? undefined : JSON.stringify(body),
      headers: { "content-type": "application/json", "x-emu-token": token } });
    const got = await answer.json();
    say(answer.ok ? done(got) : got.error.message, !answer.ok);
  } catch (error) { say(String(error), true); }
}
const post = (path, body, done) => send("POST", path, body, done);
const number = (id) => Number($(id).value) || 0;
$("kind").innerHTML = facts.faults.map((f) => `<option title="${escaped(f.text)}">${f.kind}</option>`).join("");
const faultForm = () => facts.faults.find((f) => f.kind === $("kind").value) || { keys: [] };
$("kind").onchange = () => { $("strength").firstChild.textContent = (faultForm().size || "strength").replace(/_/g, " "); $("duration").disabled = !faultForm().keys.includes("duration_s"); $("magnitude").disabled = !faultForm().keys.includes(faultForm().size); };
$("kind").onchange();
$("faults").onsubmit = (e) => {
  e.preventDefault();
  const body = { kind: $("kind").value };
  const others = last ? last.replicas.map((r) => r.id).filter((id) => id !== chosen) : [];
  for (const key of faultForm().keys) {
    if (key === "replica" || key === "source") body[key] = chosen;
    else if (key === "destination") body[key] = others[0] ?? 0;
    else if (key === "node") body[key] = last ? last.replicas[chosen].machine : 0;
    else if (key === "duration_s") body[key] = number("duration");
    else if (key === faultForm().size) body[key] = number("magnitude");
  }
  post("faults", body, (r) => `${r.kind} injected`);
};
$("commands").onsubmit = (e) => {
  e.preventDefault();
  post("commands", { replica: chosen, command: $("command").value }, (r) => `${r.command}: ${r.outcome}`);
};
const roleOf = (state) => state.startsWith("shutting") || state.startsWith("loading") ? "" : state.includes("decode") ? "decode"
  : state.includes("prefill") ? "prefill" : state === "colocated" ? "colocated" : "";
if (!facts.is_disaggregated) $("role").value = "colocated";
const scale = (n) => post("scale", { role: $("role").value, replicas: Math.max(0, n) }, (r) => `${r.replicas} ${r.role} replicas, ${r.commands.length} commands`);
$("count").oninput = () => { counted = true; };
$("role").onchange = () => { counted = false; if (last) replicas(last.replicas, true); };
$("scale").onsubmit = (e) => { e.preventDefault(); scale(number("count")); };
const serving = () => last ? last.replicas.filter((r) => roleOf(r.state) === $("role").value).length : 0;
$("more").onclick = () => scale(serving() + 1);
$("less").onclick = () => scale(serving() - 1);
$("failures").onsubmit = (e) => {
  e.preventDefault();
  post("failures", { rules: [{ status: number("fstatus"), rate: number("frate") }] }, (r) => `${r.rules.length} rule in force`);
};
$("calm").onclick = () => post("failures", { rules: [] }, () => "no failures");
$("slowing").onsubmit = (e) => {
  e.preventDefault();
  const of = $("slowed").value.trim(), factor = number("slowing-factor");
  post("knobs", { latency_factors: { [of]: factor } }, () => `latency of ${of} times ${factor}`);
};
$("pacing").onsubmit = (e) => { e.preventDefault(); post("knobs", { speed: number("newspeed") }, (r) => `speed ${r.speed}`); };
$("shade").onchange = () => { if (last) replicas(last.replicas, true); };
$("group").onchange = () => { arranged = 0; if (last) replicas(last.replicas, true); };

const named = Object.entries(facts.slo).filter(([, v]) => v).map(([k, v]) => `${k.replace("_ms", "").toUpperCase()} ${v}`);
goals = named.length ? named.join(", ") + " ms; 30 s" : "no objectives in [slo]";
put("goals", goals);
if (token) $("scenario").href += "?token=" + encodeURIComponent(token);
let pending = 0;
const soon = (call) => { clearTimeout(pending); pending = setTimeout(call, 100); };
addEventListener("resize", () => soon(() => { emuCharts.resize(); drawTrends(); }));
addEventListener("scroll", () => soon(drawTrends), { passive: true });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawTrends);
document.addEventListener("visibilitychange", () => { if (!document.hidden && last) { onState(last); drawTrends(); } });

async function reload() {
  const got = await look("history");
  if (got) points = got.points;
}

async function begin() {
  await reload();
  drawTrends();
  list();
  const source = new EventSource("emu/events" + (token ? "?token=" + encodeURIComponent(token) : ""));
  source.onmessage = (e) => onEvent(JSON.parse(e.data));
  source.onerror = () => put("status", "no connection");
}
begin();
