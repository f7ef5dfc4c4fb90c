"use strict";

// The page's state. Series have a value per row, null where the server had none.
const state = { series: { time: [] }, kept: 600, shown: 120, experts: null, key: null, lastAt: 0, data: null, cursor: null };
const POLL_MS = 1000, WAIT_MS = 8000, OLD_MS = 4000;
const $ = (id) => document.getElementById(id);

// ---- numbers with units

const DASH = "–";
function digits(value) {
  const size = Math.abs(value);
  return value.toLocaleString("en", { maximumFractionDigits: size >= 100 || size === 0 ? 0 : size >= 10 ? 1 : 2 });
}
const known = (value) => typeof value === "number" && isFinite(value);
function large(value) {
  if (!known(value)) return [DASH, ""];
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) if (Math.abs(value) >= size) return [digits(value / (unit === "k" ? 1e3 : size)), unit];
  return [digits(value), ""];
}
function seconds(value) {
  if (!known(value)) return [DASH, ""];
  for (const [size, unit] of [[1, "s"], [1e-3, "ms"]]) if (value >= size) return [digits(value / size), unit];
  return [digits(value * 1e6), "µs"];
}
const percent = (value) => known(value) ? [digits(value * 100), "%"] : [DASH, ""];
function bytes(value) {
  if (!known(value)) return [DASH, ""];
  for (const [size, unit] of [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]]) if (value >= size) return [digits(value / size), unit];
  return [digits(value), "B"];
}
const text = (pair) => pair[1] ? `${pair[0]} ${pair[1]}` : pair[0];
const perSecond = (value) => { const [n, unit] = large(value); return [n + unit, n === DASH ? "" : "/s"]; };
const count = (value) => { const [n, unit] = large(value); return [n + unit, ""]; };

// ---- elements; texts only ever become text nodes

function make(name, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "text", "rect", "g", "title"].includes(name);
  const element = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

// A flag stays on one line, dashes and all.
const words = (line) => line.split(/(--\w+)/).map((part, i) => i % 2 ? make("span", { class: "flag" }, part) : part);

// ---- curves

const CURVES = [
  { title: "Tokens per second", sub: "mean of 5 s", format: perSecond, empty: "No tokens yet.",
    lines: [["generation_tokens_per_second", "written"], ["prompt_tokens_per_second", "prompts"]] },
  { title: "Requests", sub: "in the engine", format: count, empty: "No requests yet.",
    lines: [["running", "running"], ["waiting", "waiting"], ["pages_num_loading", "loading pages"]] },
  { title: "Requests per second", sub: "finished, mean of 5 s", format: perSecond, empty: "No request has ended yet.",
    lines: [["requests_per_second", "complete"], ["failed_per_second", "aborted or failed"]] },
  { title: "Time to first token", sub: "from arrival, over 30 s", format: seconds, empty: "No first token in the last 30 s.", dashes: true,
    lines: [["ttft_p50", "p50"], ["ttft_p90", "p90"], ["ttft_p99", "p99"]], more: slowFacts },
  { title: "Time between tokens", sub: "of a sequence, over 30 s", format: seconds, empty: "No second token in the last 30 s.", dashes: true,
    lines: [["itl_p50", "p50"], ["itl_p90", "p90"], ["itl_p99", "p99"]] },
  { title: "Cache in use", sub: "pages held by requests, of all", format: percent, top: 1, empty: "No numbers of the cache.",
    lines: [["cache_usage", "in use"]] },
  { title: "Prompt tokens found in the cache", sub: "share of prompt tokens by tier, over 30 s", format: percent, top: 1, empty: "No prompt was looked up in the last 30 s.",
    lines: [["hits_device", "devices"], ["hits_host", "host memory"], ["hits_store", "store"], ["hits_peer", "another instance"]], more: tierFacts },
  { title: "Speculation: drafts that were right", sub: "share of all drafts, over 30 s", format: percent, top: 1,
    empty: "No drafts in the last 30 s.", absent: "This server makes no drafts; --speculative_config turns them on.",
    lines: [["acceptance", "accepted"]], more: placeFacts },
  { title: "Host time per step", sub: "without its wait for the devices", format: seconds, empty: "No step in the last 5 s.",
    lines: [["host_seconds_per_step", "host"]] },
];

function tierFacts() {
  return (state.data.tiers || []).map((tier) => [`${tier.name} holds`, text(bytes(tier.bytes_held))]);
}
function slowFacts() {
  const link = (each) => each.trace_url ? make("a", { href: each.trace_url, target: "_blank", rel: "noopener noreferrer" }, each.trace_id) : each.trace_id;
  return (state.data.slow_requests || []).slice(0, 3).map((each) => [`${text(seconds(each.first_token_s))}: ${each.id.slice(0, 32)}, trace`, link(each)]);
}
function placeFacts() {
  return (state.data.accepted_by_place || []).map((share, i) => [`up to draft ${i + 1}`, text(percent(share))]);
}

const HEIGHT = 190, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 22, PADDING = 30;
const widthOf = (card) => Math.max(260, card.clientWidth - PADDING);

function chart(width, height, label) {
  return make("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

function niceTop(most) {
  if (!(most > 0)) return 1;
  const size = 10 ** Math.floor(Math.log10(most));
  return [1, 1.5, 2, 3, 4, 5, 7.5, 10].map((step) => step * size).find((top) => top >= most * 1.02) || 10 * size;
}

function drawCurves(card, curves) {
  const present = curves.lines.filter(([name]) => name in state.series);
  const end = state.series.time.at(-1) || 0, start = end - state.shown;
  const first = Math.max(0, state.series.time.findIndex((t) => t >= start));
  const values = present.map(([name]) => state.series[name].slice(first));
  const times = state.series.time.slice(first);
  const all = values.flat().filter(known);
  if (!all.length) return fill(card, curves, make("p", { class: "empty" }, ...words(present.length ? curves.empty : curves.absent || curves.empty)));
  const top = curves.top || niceTop(Math.max(...all));
  const width = widthOf(card), x = (t) => LEFT + (width - LEFT - RIGHT) * (t - start) / state.shown;
  const y = (v) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - v / top);
  const svg = chart(width, HEIGHT, curves.title + ": " + present.map(([, label], i) => `${label} ${text(curves.format(values[i].at(-1)))}`).join(", "));
  grid(svg, width, top, curves.format, y);
  cursor(svg, times, x);
  svg.append(make("path", { class: "area f1", d: areaOf(values[0], times, x, y) }));
  values.forEach((row, i) => svg.append(make("path", { class: `s c${i + 1}${curves.dashes && i ? ` d${i + 1}` : ""}`, d: pathOf(row, times, x, y) })));
  svg.addEventListener("pointermove", (event) => point(event, svg, width, start));
  svg.addEventListener("pointerleave", () => { state.cursor = null; draw(); });
  const at = cursorIndex(times), shown = present.map(([, label], i) => legend(i, label, text(curves.format(values[i][at])), curves.dashes));
  const more = (curves.more ? curves.more() : []).map(([label, value]) => make("li", {}, `${label} `, make("b", {}, value)));
  fill(card, curves, svg, make("ul", { class: "legend" }, ...shown, ...more));
}

function fill(card, curves, ...content) {
  card.replaceChildren(make("h2", {}, curves.title), make("p", { class: "sub" }, curves.sub), ...content);
}

function grid(svg, width, top, format, y) {
  for (const part of [0, 0.5, 1]) {
    svg.append(make("line", { class: "gridline", x1: LEFT, x2: width - RIGHT, y1: y(top * part), y2: y(top * part) }));
    svg.append(make("text", { x: LEFT - 7, y: y(top * part) + 4, "text-anchor": "end" }, part ? text(format(top * part)) : "0"));
  }
  for (const part of [0, 0.5, 1]) {
    const ago = state.shown * (1 - part), label = ago ? `${ago >= 60 ? digits(ago / 60) + " min" : ago + " s"} ago` : "now";
    const anchor = part === 0 ? "start" : part === 1 ? "end" : "middle";
    svg.append(make("text", { x: LEFT + (width - LEFT - RIGHT) * part, y: HEIGHT - 5, "text-anchor": anchor }, label));
  }
}

function pathOf(row, times, x, y) {
  let path = "", down = false;
  row.forEach((value, i) => {
    if (known(value)) path += `${down ? "L" : "M"}${x(times[i]).toFixed(1)} ${y(value).toFixed(1)}`;
    down = known(value);
  });
  return path;
}

function areaOf(row, times, x, y) {
  return pathOf(row, times, x, y).split("M").filter(Boolean).map((piece) => {
    const ends = piece.split("L"), place = (end) => end.split(" ")[0];
    return `M${piece}L${place(ends.at(-1))} ${y(0)}L${place(ends[0])} ${y(0)}Z`;
  }).join("");
}

function legend(i, label, value, dashes) {
  const line = make("svg", { viewBox: "0 0 20 10", "aria-hidden": "true" }, make("path", { class: `s c${i + 1}${dashes && i ? ` d${i + 1}` : ""}`, d: "M1 5H19" }));
  return make("li", {}, line, `${label} `, make("b", {}, value));
}

function point(event, svg, width, start) {
  const at = event.clientX - svg.getBoundingClientRect().left;
  state.cursor = start + state.shown * Math.min(1, Math.max(0, (at - LEFT) / (width - LEFT - RIGHT)));
  draw();
}
function cursorIndex(times) {
  if (state.cursor === null) return times.length - 1;
  const index = times.findIndex((t) => t >= state.cursor);
  return index < 0 ? times.length - 1 : index;
}
function cursor(svg, times, x) {
  if (state.cursor === null) return;
  const at = x(times[cursorIndex(times)]);
  svg.append(make("line", { class: "cursor", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }));
}

// ---- tiles

function last(name) {
  const row = state.series[name];
  return row ? row.at(-1) : null;
}
function drawTiles() {
  const data = state.data, both = (name) => `p90 ${text(seconds(last(name + "_p90")))}, p99 ${text(seconds(last(name + "_p99")))}`;
  const tiles = [
    ["Tokens written", perSecond(last("generation_tokens_per_second")), `${text(perSecond(last("prompt_tokens_per_second")))} of prompts`],
    ["Requests running", count(last("running")), `${text(count(last("waiting")))} wait, room for ${text(count(data.max_num_seqs))}`],
    ["Requests finished", perSecond(last("requests_per_second")), `${text(perSecond(last("failed_per_second")))} aborted or failed`],
    ["First token, p50", seconds(last("ttft_p50")), both("ttft")],
    ["Between tokens, p50", seconds(last("itl_p50")), both("itl")],
    ["Cache in use", percent(last("cache_usage")), `${text(count(data.pages_in_use))} of ${text(count(data.num_pages))} pages`],
    ["Prompts from cache", percent(hitShare()), "of their tokens, 30 s"],
  ];
  $("tiles").replaceChildren(...tiles.map(([title, [value, unit], more]) => make("div", { class: "tile" },
    make("h2", {}, title), make("div", { class: "value" }, value, make("span", { class: "unit" }, unit)), make("div", { class: "more" }, more))));
}
function hitShare() {
  const parts = ["device", "host", "store", "peer"].map((tier) => last(`hits_${tier}`)).filter(known);
  return parts.length ? Math.min(1, parts.reduce((a, b) => a + b, 0)) : null;
}

// ---- the step timeline

const PARTS = [["plan", 1, "plan"], ["launch", 3, "launch"], ["wait", "w", "wait for devices"], ["collect", 2, "take results"], ["take requests", 4, "take requests"]];
const STEPS_DRAWN = 24;

function drawSteps(card) {
  const head = { title: "Steps of the engine", sub: `the last ${STEPS_DRAWN} steps: what the host does, and when the devices have work (at most: from launch, or the results before, to the results)` };
  const steps = (state.data.steps || []).slice(-STEPS_DRAWN - 1);
  if (steps.length < 2) return fill(card, head, make("p", { class: "empty" }, "No steps in the last seconds: the engine is idle."));
  const from = steps[0].began, to = Math.max(...steps.map((step) => step.began + duration(step) / 1e6));
  const width = widthOf(card), x = (t) => LEFT + (width - LEFT - RIGHT) * (t - from) / (to - from || 1);
  const svg = chart(width, 150, "timeline of the last steps");
  svg.append(make("text", { x: LEFT - 7, y: 42, "text-anchor": "end" }, "host"), make("text", { x: LEFT - 7, y: 102, "text-anchor": "end" }, "devices"));
  steps.forEach((step) => hostBars(svg, step, x));
  deviceBars(svg, steps, x);
  for (const part of [0, 0.25, 0.5, 0.75, 1]) svg.append(make("text", { x: x(from + (to - from) * part), y: 145, "text-anchor": part === 1 ? "end" : part ? "middle" : "start" }, text(seconds((to - from) * part))));
  const times = steps.map(duration).sort((a, b) => a - b), middle = times[times.length >> 1] / 1e6;
  const names = PARTS.map(([, color, label]) => make("li", {}, make("svg", { viewBox: "0 0 20 10" }, make("rect", { class: `f${color}`, width: 20, height: 10, rx: 2 })), label));
  const jobs = [["decode", 1], ["prefill", 2]].map(([label, color]) => make("li", {}, make("svg", { viewBox: "0 0 20 10" }, make("rect", { class: `f${color}`, width: 20, height: 10, rx: 5 })), `devices: ${label}`));
  fill(card, head, svg, make("ul", { class: "legend" }, make("li", {}, "median step ", make("b", {}, text(seconds(middle)))), make("li", {}, make("b", {}, text(perSecond(last("steps_per_second")))), " steps"), ...names, ...jobs));
}
const duration = (step) => step.parts.length ? step.parts.at(-1)[1] : 0;
const endOf = (step, part) => part ? step.began + part[1] / 1e6 : null;
const launchOf = (step) => endOf(step, step.parts.find(([name]) => name === "launch"));
const waitOf = (step) => endOf(step, step.parts.findLast(([name]) => name === "wait"));  // a step launched in two parts is waited for twice

function hostBars(svg, step, x) {
  let before = 0;
  for (const [what, at] of step.parts) {
    const part = PARTS.find(([name]) => what.startsWith(name)), left = x(step.began + before / 1e6);
    const bar = make("rect", { class: `f${part ? part[1] : 5}`, x: left, width: Math.max(0.3, x(step.began + at / 1e6) - left), y: 14, height: 48 });
    bar.append(make("title", {}, `step ${step.launched || step.collected}: ${what}, ${text(seconds((at - before) / 1e6))}`));
    svg.append(bar);
    before = at;
  }
}
function deviceBars(svg, steps, x) {
  const launched = new Map(steps.map((step) => [step.launched, step]));
  let free = steps[0].began;
  for (const step of steps) {
    const cause = launched.get(step.collected), done = waitOf(step), begun = cause && launchOf(cause);
    if (!begun || !done) continue;
    const left = x(Math.max(begun, free)), kinds = cause.jobs.map(([kind, amount]) => amount ? `${kind} ${amount}` : kind).join(", ");
    const bar = make("rect", { class: cause.jobs.some(([kind]) => kind === "prefill") ? "f2" : "f1", x: left + 0.5, width: Math.max(0.3, x(done) - left - 1), y: 74, height: 48, rx: 3 });
    bar.append(make("title", {}, `step ${step.collected}: ${kinds}`));
    svg.append(bar);
    free = done;
  }
}

// ---- heat maps of experts: cividis, which looks the same to readers who confuse red and green

const CIVIDIS = [[0, 32, 77], [0, 51, 111], [57, 72, 107], [87, 92, 109], [112, 113, 115], [138, 135, 121], [166, 157, 117], [196, 181, 108], [228, 207, 91], [255, 234, 70]];
const MOST = 200;

function color(value) {
  const at = Math.min(1, Math.max(0, value / MOST)) * (CIVIDIS.length - 1), low = Math.floor(at), high = Math.min(low + 1, CIVIDIS.length - 1);
  return CIVIDIS[low].map((c, i) => Math.round(c + (CIVIDIS[high][i] - c) * (at - low)));
}
function paint(canvas, rows) {
  canvas.width = rows[0].length;
  canvas.height = rows.length;
  const context = canvas.getContext("2d"), image = context.createImageData(canvas.width, canvas.height);
  rows.flat().forEach((value, i) => image.data.set([...color(value), 255], i * 4));
  context.putImageData(image, 0, 0);
}
function heatMap(title, rows, unit, read) {
  const canvas = make("canvas", { role: "img", "aria-label": `${title}: ${rows.length} layers, ${rows[0].length} ${unit}s, most loaded ${Math.max(...rows.flat())} percent of the mean` });
  paint(canvas, rows);
  canvas.addEventListener("pointermove", (event) => {
    const box = canvas.getBoundingClientRect();
    const layer = Math.min(rows.length - 1, Math.floor((event.clientY - box.top) / box.height * rows.length));
    const column = Math.min(rows[0].length - 1, Math.floor((event.clientX - box.left) / box.width * rows[0].length));
    if (rows[layer]) read.textContent = `${title}: layer ${layer}, ${unit} ${column} has ${rows[layer][column]} % of the layer's mean`;
  });
  const map = make("div", { class: "map" }, make("span", { class: "rows" }, `${rows.length} MoE layers`), canvas, make("span", { class: "columns" }, `${rows[0].length} ${unit}s`));
  return make("div", {}, make("h3", {}, title), map);
}
function drawExperts(card) {
  const experts = state.experts, head = { title: "Load of experts", sub: "share of each layer's mean" };
  if (!experts) return fill(card, head, make("p", { class: "empty" }, ...words("Each device holds all experts, so there is no load to even out. With --enable_expert_parallel they are spread over devices, and this shows how much each has to do.")));
  const busiest = (rows) => rows.length ? `, busiest ${Math.max(...rows.flat())} %` : "";
  if (!experts.load.flat().some((value) => value > 0)) return fill(card, head, make("p", { class: "empty" }, "No load was read out yet: that happens every 128 steps."));
  const read = make("p", { class: "read" }, experts.after.length ? "" : "No experts were moved yet. ");
  const maps = [];
  if (experts.after.length) maps.push(heatMap(`devices before the last move${busiest(experts.before)}`, experts.before, "device", read), heatMap(`the same load after it${busiest(experts.after)}`, experts.after, "device", read));
  maps.push(heatMap(`devices now${busiest(experts.device_load)}`, experts.device_load, "device", read), heatMap(`experts now${busiest(experts.load)}`, experts.load, "expert", read));
  const bar = make("canvas", { "aria-hidden": "true" });
  paint(bar, [Array.from({ length: 90 }, (_, i) => i * MOST / 89)]);
  const facts = `${digits(experts.moved || 0)} replicas moved in ${digits(experts.rebalances || 0)} rounds; mean device has ${text(percent(experts.balancedness))} of the busiest one's load`;
  fill(card, head, make("div", { class: "maps" }, ...maps), make("div", { class: "scale" }, "0 %", bar, `${MOST} % and more; 100 % is even. `, facts), read);
}
function updateExperts(update) {
  if (!update) { state.experts = null; return true; }
  const names = { rebalances: update.experts_rebalances, moved: update.experts_moved, balancedness: update.experts_balancedness };
  const isNew = "load" in update;
  if (isNew || state.experts) state.experts = { ...(state.experts || {}), ...update, ...names };
  return isNew;
}

// ---- merging data

function update(data) {
  const time = state.series.time, rows = data.series.time.map((t, i) => [t, i]).filter(([t]) => Math.floor(t) > Math.floor(time.at(-1) || 0));
  for (const name of Object.keys(data.series)) if (!(name in state.series)) state.series[name] = time.map(() => null);
  for (const [name, row] of Object.entries(state.series)) {
    for (const [, i] of rows) row.push(name in data.series ? data.series[name][i] : null);
  }
  const extra = Math.max(0, time.length - data.kept_s);
  if (extra) for (const row of Object.values(state.series)) row.splice(0, extra);
  const redraw = updateExperts(data.experts);
  const first = state.data === null;
  state.data = data;
  state.lastAt = Date.now();
  return redraw || first;
}

let cards = null;
function draw() {
  if (!state.data) return;
  drawTiles();
  CURVES.forEach((curves, i) => drawCurves(cards[i], curves));
}
function drawAll(withExperts) {
  if (!cards) {
    cards = [...CURVES.map(() => make("article", { class: "card" })), make("article", { class: "card wide" }), make("article", { class: "card wide" })];
    $("cards").replaceChildren(...cards);
  }
  const data = state.data, started = Math.max(0, data.now - data.started);
  $("model").textContent = data.model;
  document.title = `${data.model}: ${digits(last("generation_tokens_per_second") || 0)} tokens/s`;
  $("status").textContent = data.status === "ok" ? "serving" : data.reason || data.status;
  $("status").classList.toggle("ok", data.status === "ok");
  const age = started > 5400 ? `${Math.round(started / 3600)} h` : started > 90 ? `${Math.round(started / 60)} min` : `${Math.round(started)} s`;
  const replaced = Object.entries(data.kernel_fallbacks || {}).map(([operation, backend]) => `, ${operation} by ${backend}`).join("");
  $("facts").textContent = `up ${age}, context ${text(count(data.max_model_len))} tokens` + replaced + (data.recompilations ? `, ${data.recompilations} programs compiled while serving` : "");
  draw();
  drawSteps(cards.at(-2));
  if (withExperts) drawExperts(cards.at(-1));
}

// ---- polling

function show(what, why = "") {
  $("gate").hidden = what !== "gate";
  $("board").hidden = what !== "board";
  $("refusal").textContent = why;
  if (what === "gate") $("key").focus();
}
function notice(words) {
  $("notice").hidden = !words;
  $("notice").textContent = words;
  $("board").classList.toggle("old", Boolean(words));
}
async function fetchData() {
  const time = state.series.time, query = new URLSearchParams({ since: time.at(-1) || 0, experts: state.experts ? state.experts.version : -1 });
  const headers = state.key ? { authorization: `Bearer ${state.key}` } : {};
  const reply = await fetch(`dashboard/data?${query}`, { headers, cache: "no-store", signal: AbortSignal.timeout(WAIT_MS) });
  if (reply.status === 401 || reply.status === 403) return onRejected(reply.status);
  if (!reply.ok) throw new Error(`the server returned status ${reply.status}`);
  const withExperts = update(await reply.json());
  if (state.key) sessionStorage.setItem("dsv3.key", state.key);
  show("board");
  notice("");
  drawAll(withExperts);
  return true;
}
function onRejected(status) {
  const had = state.key !== null;
  state.key = null;
  sessionStorage.removeItem("dsv3.key");
  $("status").textContent = "needs a key";
  $("status").classList.remove("ok");
  show("gate", status === 403 ? "This key is not the operator's; the dashboard shows data of all tenants." : had ? "The server does not know this key." : "");
  return false;
}
async function poll() {
  let isPolling = true;
  try {
    if (!document.hidden) isPolling = await fetchData();
  } catch (error) {
    const old = Date.now() - state.lastAt;
    if (!state.data) $("status").textContent = "no response";
    if (old > OLD_MS) notice(state.data ? `No response for ${Math.round(old / 1000)} s; the data are old. ${error.message}` : `No response: ${error.message}`);
  }
  if (isPolling) setTimeout(poll, POLL_MS);
}

// ---- controls

function choose(seconds) {
  state.shown = seconds;
  for (const button of $("range").querySelectorAll("button")) button.setAttribute("aria-pressed", String(Number(button.value) === seconds));
  draw();
}
function theme(name) {
  if (name === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  $("theme").textContent = `theme: ${name}`;
  sessionStorage.setItem("dsv3.theme", name);
}
function begin() {
  state.key = sessionStorage.getItem("dsv3.key");
  for (const [seconds, label] of [[120, "2 min"], [600, "10 min"]]) {
    const button = make("button", { type: "button", value: seconds }, label);
    button.addEventListener("click", () => choose(seconds));
    $("range").append(button);
  }
  choose(state.shown);
  theme(sessionStorage.getItem("dsv3.theme") || "system");
  $("theme").addEventListener("click", () => {
    const names = ["system", "light", "dark"], now = sessionStorage.getItem("dsv3.theme");
    theme(names[(names.indexOf(now) + 1) % names.length]);
  });
  $("gate").addEventListener("submit", (event) => {
    event.preventDefault();
    state.key = $("key").value.trim();
    $("key").value = "";
    poll();
  });
  poll();
}
begin();
