// The console's shell and its views of requests, KV cache and actors. Text from the server or a model is only ever set
// as text, never as HTML.
import { showPlayground } from "./playground.js";

export const base = new URL("../", import.meta.url);
const POLL_MS = 2000, HISTORY_S = 600, KEPT = 5000, ROW = 40;

// ------------------------------------------------------------------ elements

export function make(name, options = {}, ...children) {
  const { text, class: classes, on = {}, ...attributes } = options;
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (classes) made.className = classes;
  for (const [attribute, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null && value !== false) made.setAttribute(attribute, value === true ? "" : value);
  }
  for (const [event, handler] of Object.entries(on)) made.addEventListener(event, handler);
  made.append(...children.filter(child => child !== null && child !== undefined));
  return made;
}

function svg(name, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
  made.append(...children);
  return made;
}

export const $ = id => document.getElementById(id);
const sum = values => values.reduce((total, value) => total + value, 0);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.001) return `${Math.round(seconds * 1e6)} µs`;
  if (seconds < 1) return `${(seconds * 1000).toFixed(seconds < 0.1 ? 1 : 0)} ms`;
  if (seconds < 100) return `${seconds.toFixed(2)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

const number = value => Math.round(value).toLocaleString("en");
const percent = value => `${(100 * value).toFixed(value < 0.1 ? 1 : 0)} %`;
const clock = at => new Date(at * 1000).toLocaleTimeString();

// ------------------------------------------------------------------ calls

let apiKey = sessionStorage.getItem("raylm.key") || "";
let asking = false;

export function headers(extra = {}) {
  return apiKey ? { ...extra, Authorization: `Bearer ${apiKey}` } : extra;
}

export class CallError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

export async function refusal(answer) {
  let message = `The server answered ${answer.status}.`;
  try {
    const body = await answer.json();
    message = body.error?.message || body.message || message;
  } catch { /* it is not JSON */ }
  if (answer.status === 401) askForKey(apiKey ? "This key is not valid." : "");
  return new CallError(message, answer.status);
}

export async function call(path, options = {}) {
  const answer = await fetch(new URL(path, base), { ...options, headers: headers(options.headers) });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

function askForKey(problem = "") {
  $("keyerror").textContent = problem;
  if (asking) return;
  asking = true;
  $("keyinput").value = "";
  $("keydialog").showModal();
}

$("keydialog").addEventListener("close", () => { asking = false; });
$("keycancel").addEventListener("click", () => $("keydialog").close());
$("key").addEventListener("click", () => askForKey());
$("keyform").addEventListener("submit", async event => {
  event.preventDefault();
  const tried = $("keyinput").value.trim();
  const before = apiKey;
  apiKey = tried;
  const answer = await fetch(new URL("v1/models", base), { headers: headers() });
  if (answer.status === 401) {
    apiKey = before;
    $("keyerror").textContent = "This key is not valid.";
    return;
  }
  sessionStorage.setItem("raylm.key", tried);
  lines.clear();
  newest = 0;
  $("keydialog").close();
  poll();
  show();
});

// ------------------------------------------------------------------ what is known

const lines = new Map();  // by id and arrival
const samples = [];       // of the cluster
let cluster = null, newest = 0, problem = "";
const began = Date.now() / 1000;

export function notice(text) {
  $("notice").textContent = text;
  $("notice").hidden = !text;
}

async function refresh() {
  const [told, listed] = await Promise.all([
    call("v1/cluster"),
    call(`v1/requests?limit=${newest ? 2000 : KEPT}${newest ? `&since=${newest}` : ""}`),
  ]);
  cluster = told;
  for (const [name, line] of lines) if (line.ended === null) lines.delete(name);
  for (const line of listed.data) {
    lines.set(`${line.id} ${line.received}`, line);
    if (line.ended) newest = Math.max(newest, line.ended);
  }
  if (lines.size > KEPT) {
    const oldest = [...lines.entries()].sort((a, b) => a[1].received - b[1].received).slice(0, lines.size - KEPT);
    for (const [name] of oldest) lines.delete(name);
  }
  if (!samples.length) samples.push(...(await call("v1/cluster/history")).samples.filter(one => one.at < told.now));
  samples.push({
    at: told.now,
    running: sum(told.engines.map(one => one.running)),
    waiting: sum(told.engines.map(one => one.waiting)),
    kv_usage: told.engines.length ? sum(told.engines.map(one => one.kv_usage)) / told.engines.length : 0,
    generation_tokens: Object.fromEntries(told.engines.map(one => [one.id, one.generation_tokens])),
  });
  while (samples.length && samples[0].at < told.now - HISTORY_S) samples.shift();
  $("model").textContent = told.model;
  const missing = [...new Set([...told.missing, ...listed.missing])];
  problem = missing.length ? `These ingress replicas did not answer: ${missing.join(", ")}.` : "";
}

let timer = null;

async function poll() {
  clearTimeout(timer);
  const live = $("live");
  try {
    await refresh();
    live.className = "live ok";
    live.textContent = cluster.engines.length ? "live" : "no engine is ready";
    notice(problem);
  } catch (error) {
    live.className = "live bad";
    live.textContent = error.status ? "refused" : "no connection";
    if (error.status === 403) notice(error.message);
    else if (error.status !== 401) notice(error.status ? error.message : "The server does not answer; trying again.");
  }
  if (update) update();
  timer = setTimeout(poll, document.hidden ? 5 * POLL_MS : POLL_MS);
}

// ------------------------------------------------------------------ overview

function chart(title, span, series, { format, dots = [], labels = [] }) {
  const now = cluster.now, width = 600, height = 120;
  const points = series.flat(), highest = Math.max(1e-9, ...points.map(p => p[1]), ...dots.map(p => p[1]));
  const x = at => width * (1 - (now - at) / span), y = value => height - 4 - (height - 10) * value / highest;
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": title });
  picture.append(svg("line", { class: "axis", x1: 0, x2: width, y1: height - 3, y2: height - 3 }));
  for (const [at, value] of dots) {
    if (at > now - span) picture.append(svg("path", { class: "dot", d: `M${x(at).toFixed(1)} ${y(value).toFixed(1)}h0` }));
  }
  series.forEach((one, place) => {
    const shown = one.filter(point => point[0] > now - span);
    if (!shown.length) return;
    const path = shown.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    if (place === 0 && !dots.length) {
      const ends = `${x(shown[shown.length - 1][0]).toFixed(1)},${height - 3} ${x(shown[0][0]).toFixed(1)},${height - 3}`;
      picture.append(svg("polygon", { class: "area", points: `${path} ${ends}` }));
    }
    picture.append(svg("polyline", { class: place ? "line b" : "line", points: path }));
  });
  const keys = labels.map((label, place) => make("span", { class: "key" }, make("i", { class: place ? "b" : "" }), label));
  return make("section", { class: "panel chart" },
    make("div", { class: "top" }, make("h2", { text: title }),
      keys.length ? make("span", { class: "row" }, ...keys) : make("span", { class: "muted most", text: points.length + dots.length ? `up to ${format(highest)}` : "nothing yet" })),
    picture,
    make("div", { class: "foot" }, make("span", { text: `${span / 60} min ago` }), make("span", { text: "now" })));
}

function rate(from, until) {
  // Of an engine that was not known at `from`, nobody knows when it generated its tokens.
  const tokens = sum(Object.entries(until.generation_tokens).map(([name, count]) => count - (from.generation_tokens[name] ?? count)));
  return until.at > from.at ? tokens / (until.at - from.at) : 0;
}

function rates() {
  return samples.slice(1).map((one, place) => [one.at, rate(samples[place], one)]);
}

function median(values) {
  if (!values.length) return null;
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.floor(sorted.length / 2)];
}

function showOverview(main) {
  const view = make("div", { class: "view" });
  main.replaceChildren(view);
  return () => {
    if (!cluster) {
      view.replaceChildren(make("p", { class: "muted", text: "Waiting for the server." }));
      return;
    }
    const now = cluster.now, all = [...lines.values()], recent = all.filter(line => (line.ended ?? now) > now - HISTORY_S);
    const begun = recent.filter(line => line.ttft_s !== null), last = samples[samples.length - 1], old = samples[Math.max(0, samples.length - 6)];
    const itl = recent.filter(line => line.completion_tokens > 1 && line.ended && line.decode_s).map(line => line.decode_s / (line.completion_tokens - 1));
    const asked = sum(recent.map(line => line.prompt_tokens)), cached = sum(recent.map(line => line.cached_tokens));
    const tile = (value, label) => make("div", { class: "tile" }, make("b", { text: value }), make("span", { text: label }));
    const first = Math.min(now, samples[0].at, ...recent.map(line => line.received));
    const span = [60, 120, 300].find(seconds => now - first < seconds) || HISTORY_S, tokens = rates().filter(point => point[0] > now - span);
    const usage = Math.max(0, ...cluster.engines.map(one => one.kv_usage));
    view.replaceChildren(
      make("div", { class: "head" }, make("h1", { text: "Overview" }),
        make("span", { class: "muted", text: `${number(recent.length)} requests in the last ten minutes` })),
      make("div", { class: "tiles" },
        tile(number(rate(old, last)), "tokens/s"),
        tile(duration(median(begun.map(line => line.ttft_s))), "time to first token, median"),
        tile(duration(median(itl)), "inter-token latency, median"),
        tile(`${last.running} · ${last.waiting}`, "running · waiting sequences"),
        tile(percent(usage), "KV cache usage"),
        tile(asked ? percent(cached / asked) : "–", "cached prompt tokens")),
      make("div", { class: "charts" },
        chart("Tokens/s", span, [tokens], { format: number }),
        chart("Time to first token", span, [], { format: duration, dots: begun.slice(-1500).map(line => [line.received + line.ttft_s, line.ttft_s]) }),
        chart("Inter-token latency", span, [], { format: duration, dots: recent.filter(line => line.ended && line.completion_tokens > 1).slice(-1500).map(line => [line.ended, line.decode_s / (line.completion_tokens - 1)]) }),
        chart("Sequences", span, [samples.map(one => [one.at, one.running]), samples.map(one => [one.at, one.waiting])], { format: number, labels: ["running", "waiting"] }),
        chart("KV cache usage", span, [samples.map(one => [one.at, 100 * one.kv_usage])], { format: value => `${value.toFixed(0)} %` }),
        chart("Cached prompt tokens", span, [], { format: value => `${value.toFixed(0)} %`, dots: recent.filter(line => line.ended && line.prompt_tokens).slice(-1500).map(line => [line.ended, 100 * line.cached_tokens / line.prompt_tokens]) })),
      slowest(recent));
  };
}

function slowest(recent) {
  const shown = recent.filter(line => line.seconds !== null).sort((a, b) => b.seconds - a.seconds).slice(0, 5);
  const rows = shown.map(line => make("tr", {},
    make("td", {}, make("a", { text: line.id.slice(0, 40), href: `#/requests/${encodeURIComponent(line.id)}`, class: "mono" })),
    make("td", { text: line.path }), make("td", { class: "num", text: duration(line.ttft_s) }),
    make("td", { class: "num", text: duration(line.seconds) }), make("td", { class: "num", text: number(line.completion_tokens) })));
  if (!rows.length) return make("p", { class: "muted", text: "No request has ended yet. Try one in the playground." });
  return make("section", { class: "panel" }, make("h2", { text: "Slowest recent requests" }),
    make("div", { class: "scroll" }, table(["Request", "Path", ["TTFT"], ["Latency"], ["Output tokens"]], rows)));
}

function table(titles, rows) {
  const cells = titles.map(title => Array.isArray(title) ? make("th", { class: "num", text: title[0], scope: "col" }) : make("th", { text: title, scope: "col" }));
  return make("table", {}, make("thead", {}, make("tr", {}, ...cells)), make("tbody", {}, ...rows));
}

// ------------------------------------------------------------------ requests

const wanted = { text: "", state: "all", key: "", model: "" };
let chosen = 0, scrolled = 0;

function matching() {
  const text = wanted.text.toLowerCase();
  return [...lines.values()].filter(line =>
    (wanted.state === "all" || (wanted.state === "open") === (line.ended === null)) &&
    (!wanted.key || line.key === wanted.key) && (!wanted.model || line.model === wanted.model) &&
    (!text || `${line.id} ${line.path} ${line.model} ${line.key} ${line.outcome}`.toLowerCase().includes(text)))
    .sort((a, b) => (a.ended === null) === (b.ended === null) ? b.received - a.received : a.ended === null ? -1 : 1);
}

function requestRow(line, place) {
  const kind = line.ended === null ? "open" : (line.status ?? 200) < 400 && !["client_left"].includes(line.outcome) ? "ok" : "bad";
  const row = make("div", { class: "line-row", role: "option", id: `row-${place}`, "aria-selected": String(place === chosen) },
    make("i", { class: `dot-state ${kind}` }),
    make("span", { class: "clip mono", text: line.id, title: line.id }),
    make("span", { class: "clip wide muted", text: line.model || line.path, title: line.model }),
    make("span", { class: "num", text: duration(line.ttft_s) }),
    make("span", { class: "num", text: duration(line.seconds ?? (cluster ? cluster.now - line.received : null)) }),
    make("span", { class: "num wide", text: `${number(line.prompt_tokens)} → ${number(line.completion_tokens)}` }),
    make("span", { class: "clip wide muted", text: line.key || "–", title: line.key }),
    make("span", { class: "clip wide", text: line.ended === null ? line.state : line.outcome, title: line.outcome }));
  row.style.top = `${place * ROW}px`;
  row.addEventListener("click", () => { chosen = place; open(line); });
  return row;
}

function open(line) {
  location.hash = `#/requests/${encodeURIComponent(line.id)}`;
}

function showRequests(main) {
  let found = [];
  const space = make("div"), box = make("div", { class: "lines", role: "listbox", tabindex: "0", "aria-label": "Requests" }, space);
  const count = make("span", { class: "muted", id: "count" });
  const select = (name, label) => make("select", { "aria-label": label, on: { change: event => { wanted[name] = event.target.value; restart(); } } });
  const keys = select("key", "Key"), models = select("model", "Model"), states = select("state", "State");
  for (const [value, text] of [["all", "In flight and recent"], ["open", "In flight"], ["ended", "Ended"]]) states.append(make("option", { value, text }));
  states.value = wanted.state;
  const search = make("input", { type: "search", placeholder: "Search id, path, model, key, outcome", "aria-label": "Search", id: "search", on: { input: event => { wanted.text = event.target.value; restart(); } } });
  search.value = wanted.text;
  const head = make("div", { class: "line-row line-head" }, make("span"), make("span", { text: "Request" }), make("span", { class: "wide", text: "Model" }),
    make("span", { class: "num", text: "TTFT" }), make("span", { class: "num", text: "Latency" }), make("span", { class: "num wide", text: "Tokens" }),
    make("span", { class: "wide", text: "Key" }), make("span", { class: "wide", text: "State" }));
  main.replaceChildren(make("div", { class: "full" },
    make("div", { class: "head" }, make("h1", { text: "Requests" }), count),
    make("div", { class: "filters" }, search, states, models, keys),
    make("div", { class: "list" }, head, box)));

  function draw() {
    scrolled = box.scrollTop;
    const first = Math.max(0, Math.floor(box.scrollTop / ROW) - 4), last = Math.min(found.length, first + Math.ceil(box.clientHeight / ROW) + 8);
    const rows = [];
    for (let place = first; place < last; place++) rows.push(requestRow(found[place], place));
    space.style.height = `${found.length * ROW}px`;
    box.replaceChildren(space, ...rows);
    if (!found.length) box.append(make("p", { class: "empty", text: lines.size ? "Nothing matches." : "No request yet. Try one in the playground." }));
  }

  function options(element, name, label) {
    const values = [...new Set([...lines.values()].map(line => line[name]))].filter(Boolean).sort();
    if (element.options.length === values.length + 1) return;
    element.replaceChildren(make("option", { value: "", text: label }), ...values.map(value => make("option", { value, text: value.slice(0, 60) })));
    element.value = wanted[name];
  }

  function refreshList() {
    options(keys, "key", "All keys");
    options(models, "model", "All models");
    keys.hidden = keys.options.length < 2;
    models.hidden = models.options.length < 3;
    found = matching();
    count.textContent = `${found.length.toLocaleString("en")} of ${lines.size.toLocaleString("en")}`;
    draw();
  }

  function restart() {
    box.scrollTop = 0;
    chosen = 0;
    refreshList();
  }

  let waiting = false;
  box.addEventListener("scroll", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; draw(); });
  });
  box.addEventListener("keydown", event => {
    const step = { ArrowDown: 1, ArrowUp: -1, PageDown: 10, PageUp: -10, Home: -1e9, End: 1e9 }[event.key];
    if (event.key === "Enter" && found[chosen]) open(found[chosen]);
    if (!step || !found.length) return;
    event.preventDefault();
    chosen = Math.min(found.length - 1, Math.max(0, chosen + step));
    if (chosen * ROW < box.scrollTop) box.scrollTop = chosen * ROW;
    if ((chosen + 1) * ROW > box.scrollTop + box.clientHeight) box.scrollTop = (chosen + 1) * ROW - box.clientHeight;
    box.setAttribute("aria-activedescendant", `row-${chosen}`);
    draw();
  });
  requestAnimationFrame(() => { const at = scrolled; refreshList(); box.scrollTop = at; draw(); });
  return refreshList;
}

// ------------------------------------------------------------------ one request

const WHY = {
  queue: "waiting in a queue", preemption: "being preempted", cold_cache: "a cold cache", prompt: "computing the prompt",
  slow_client: "a client that reads slowly", compile: "compiling the structured output", decode: "generating the answer",
  engine_lost: "the loss of an engine", slow_upload: "receiving the body", text: "parsing the fields and the text",
};

function showRequest(main, id) {
  const view = make("div", { class: "view" });
  main.replaceChildren(view);
  let ended = false, busy = false;

  async function load() {
    if (ended || busy) return;
    busy = true;
    try {
      const life = await call(`v1/requests/${encodeURIComponent(id)}`);
      ended = life.ended !== null;
      view.replaceChildren(...life_(life));
    } catch (error) {
      view.replaceChildren(back(), make("p", { class: "error", text: error.message }));
    }
    busy = false;
  }

  function back() {
    return make("a", { href: "#/requests", text: "← Requests" });
  }

  function life_(life) {
    const share = cause => percent(cause.seconds / Math.max(1e-9, life.wall_s));
    const end = make("button", { type: "button", class: "danger", text: "End this request", on: { click: async () => {
      end.disabled = true;
      try { await call(`v1/requests/${encodeURIComponent(id)}`, { method: "DELETE" }); } catch (error) { notice(error.message); }
      load();
    } } });
    const trace = make("button", { type: "button", text: "Save trace", title: "Chrome trace events: open the file in ui.perfetto.dev", on: { click: () => saveTrace(id) } });
    const [first, ...others] = life.causes;
    const why = make("p", { class: "why", id: "why" }, ...(first ? [make("b", { text: `${share(first)} of its time went into ${WHY[first.cause] || first.cause}. ` }), first.explanation] : ["It has only begun."]));
    return [
      make("div", { class: "head" }, make("div", { class: "grow" }, back(), make("h1", { class: "clip mono", text: life.id, title: life.id })),
        make("div", { class: "row" }, trace, life.ended === null ? end : null)),
      make("section", { class: "panel" }, why,
        others.length ? make("p", { class: "muted", text: `Then ${others.slice(0, 3).map(one => `${WHY[one.cause] || one.cause} (${duration(one.seconds)})`).join(", ")}.` }) : null,
        make("div", { class: "strip", "aria-hidden": "true" }, ...life.phases.map(phase => { const piece = make("i", { class: `i-${phase.phase}`, title: `${phase.phase} ${duration(phase.seconds)}` }); piece.style.flexGrow = phase.seconds; piece.style.flexBasis = "0"; return piece; })),
        waterfall(life)),
      make("section", { class: "panel" }, make("h2", { text: "Details" }), facts(life)),
      ...life.parts.map((part, place) => partPanel(life, part, place)),
    ];
  }

  load();
  return load;
}

function bar(name, from, seconds, whole, title) {
  const piece = make("i", { class: `i-${name}`, title });
  piece.style.left = `${100 * Math.min(1, Math.max(0, from / whole))}%`;
  piece.style.width = `${100 * Math.max(0, seconds / whole)}%`;
  return make("span", { class: "track" }, piece);
}

function waterfall(life) {
  const whole = Math.max(1e-9, life.wall_s), rows = [];
  for (const phase of life.phases) {
    const text = `${phase.phase}: ${duration(phase.seconds)} from ${duration(phase.start_s)}`;
    rows.push(make("span", { text: phase.phase }), bar(phase.phase, phase.start_s, phase.seconds, whole, text), make("span", { class: "num", text: duration(phase.seconds) }));
  }
  return make("div", { class: "fall", id: "waterfall" }, ...rows);
}

function facts(life) {
  const list = [
    ["Arrived", new Date(life.received * 1000).toLocaleString()], ["Latency", duration(life.wall_s)], ["Time to first token", duration(life.ttft_s)],
    ["Ended", life.ended === null ? `not yet: ${life.state}` : life.outcome], ["Status", life.status ?? "–"], ["Path", life.path], ["Model", life.model || "–"],
    ["Key", life.key || "–"], ["Prompt", `${number(life.prompt_tokens)} tokens, ${number(life.cached_tokens)} cached`], ["Answer", `${number(life.completion_tokens)} tokens`],
    ["Blocked by the client", duration(life.blocked_s)], ["Ingress", life.ingress], ["Engine", life.engine || "–"],
  ];
  return make("dl", { class: "facts" }, ...list.map(([name, value]) => make("div", {}, make("dt", { text: name }), make("dd", { text: String(value) }))));
}

function partPanel(life, part, place) {
  const whole = Math.max(1e-9, life.wall_s), panel = make("section", { class: "panel" });
  panel.append(make("h2", { text: life.parts.length > 1 ? `Prompt ${place + 1}` : "In the engine" }));
  const rows = [];
  for (const one of part.steps.slice(0, 200)) {
    const steps = one.first_step === one.last_step ? `step ${one.first_step}` : `steps ${one.first_step}–${one.last_step}`;
    const text = `${steps}, ${one.tokens} tokens`;
    rows.push(make("span", { class: "clip", text: part.completion_tokens.length > 1 ? `${one.doing} · ${one.sequence}` : one.doing }), bar(one.doing, one.start_s, one.end_s - one.start_s, whole, text), make("span", { class: "num muted clip", text, title: text }));
  }
  if (rows.length) panel.append(make("div", { class: "fall" }, ...rows));
  for (const event of part.events.filter(one => one.event === "preempted").slice(0, 10)) {
    panel.append(make("p", { class: "muted", text: `Preempted after ${duration(event.at_s)} in step ${event.step}, with ${number(event.tokens)} tokens computed${event.by ? `, for ${event.by}` : ""}.` }));
  }
  if (part.tokens_computed_again) panel.append(make("p", { class: "muted", text: `${number(part.tokens_computed_again)} tokens were computed again.` }));
  for (const route of part.routes) {
    panel.append(make("h3", { text: `Sent to ${route.engine} after ${duration(route.at_s)}` }));
    if (!route.considered.length) { panel.append(make("p", { class: "muted", text: route.reason })); continue; }
    panel.append(make("div", { class: "scroll" }, table(["Engine", ["Predicted TTFT"], ["Tokens to compute"], ["Queued tokens"], ["Waiting"], ["Updated"]],
      route.considered.map(one => make("tr", { class: one.engine === route.engine ? "picked" : "" }, make("td", { text: one.engine }), make("td", { class: "num", text: duration(one.predicted_s) }),
        make("td", { class: "num", text: number(one.tokens_to_compute) }), make("td", { class: "num", text: number(one.queued_tokens) }), make("td", { class: "num", text: number(one.waiting) }), make("td", { class: "num", text: `${duration(one.told_s_ago)} ago` }))))));
  }
  return panel;
}

async function saveTrace(id) {
  try {
    save(`${id.replace(/[^\w.-]/g, "-")}.json`, JSON.stringify(await call(`v1/requests/${encodeURIComponent(id)}?format=trace`)));
  } catch (error) {
    notice(error.message);
  }
}

export function save(name, text, type = "application/json") {
  const url = URL.createObjectURL(new Blob([text], { type }));
  const link = make("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

// ------------------------------------------------------------------ KV cache

const hues = new Map();  // by request, in the order in which they were seen: neighbours are far apart

function hue(name) {
  if (!hues.has(name)) hues.set(name, (hues.size * 137.5 + 200) % 360);
  return hues.get(name);
}

function showMemory(main) {
  const view = make("div", { class: "view" });
  main.replaceChildren(view);
  let busy = false;

  async function load() {
    if (busy) return;
    busy = true;
    try {
      const told = await call("v1/cluster/kv");
      view.replaceChildren(make("div", { class: "head" }, make("h1", { text: "KV cache" }), make("span", { class: "muted", text: "each square is a block; what several sequences share shows the last one's colour" })),
        ...(told.pools.length ? told.pools.map(pool) : [make("p", { class: "muted", text: "No engine is ready." })]));
      view.querySelectorAll("canvas").forEach(canvas => canvas.draw());
    } catch (error) {
      view.replaceChildren(make("h1", { text: "KV cache" }), make("p", { class: "error", text: error.message }));
    }
    busy = false;
  }

  load();
  return load;
}

function pool(told) {
  const owners = new Array(told.blocks).fill(null), age = new Map();
  let place = 0;
  const cachedCount = sum(told.cached.map(run => run[1]));
  for (const [first, count] of told.cached) for (let block = first; block < first + count; block++) age.set(block, place++ / Math.max(1, cachedCount));
  const held = new Set(), byRequest = new Map();
  for (const sequence of told.sequences) {
    const name = sequence.request_id || "another key's";
    for (const [first, count] of sequence.runs) for (let block = first; block < first + count; block++) { owners[block] = name; held.add(block); }
    const known = byRequest.get(name) || { blocks: 0, tokens: 0, status: sequence.status };
    known.blocks += sum(sequence.runs.map(run => run[1]));
    known.tokens += sequence.tokens;
    byRequest.set(name, known);
  }
  const canvas = make("canvas", { class: "pool", role: "img", "aria-label": `${held.size} blocks held, ${cachedCount} cached, of ${told.blocks}` });
  canvas.draw = () => {
    const width = canvas.clientWidth, wide = told.blocks > 20000 ? 4 : told.blocks > 4000 ? 7 : told.blocks > 600 ? 12 : 20;
    const columns = Math.max(1, Math.floor(width / wide)), rows = Math.ceil(told.blocks / columns), scale = window.devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = rows * wide * scale;
    const pen = canvas.getContext("2d"), style = getComputedStyle(document.documentElement), dark = document.documentElement.dataset.theme === "dark";
    pen.scale(scale, scale);
    const accent = style.getPropertyValue("--muted"), line = style.getPropertyValue("--line"), gap = wide > 6 ? 1.5 : 0.5;
    for (let block = 0; block < told.blocks; block++) {
      const x = (block % columns) * wide, y = Math.floor(block / columns) * wide;
      pen.globalAlpha = 1;
      if (owners[block] !== null) pen.fillStyle = `hsl(${hue(owners[block])} 52% ${dark ? 62 : 52}%)`;
      else if (age.has(block)) { pen.fillStyle = accent; pen.globalAlpha = 0.2 + 0.45 * age.get(block); }
      else { pen.fillStyle = line; pen.globalAlpha = 0.75; }
      pen.fillRect(x, y, wide - gap, wide - gap);
    }
  };
  const swatch = (color, text, opacity = 1) => { const dot = make("i"); dot.style.background = color; dot.style.opacity = opacity; return make("span", {}, dot, make("span", { class: "clip", text })); };
  const dark = document.documentElement.dataset.theme === "dark";
  const all = [...byRequest.entries()].sort((a, b) => b[1].blocks - a[1].blocks), listed = all.filter(one => one[1].blocks);
  const waiting = all.length - listed.length;
  const free = Math.max(0, told.blocks - held.size - cachedCount - told.left_out);
  return make("section", { class: "panel" },
    make("div", { class: "head" }, make("h2", { text: told.engine }), make("span", { class: "muted", text: `${number(told.blocks)} blocks of ${told.block_size} tokens` })),
    make("div", { class: "legend" }, swatch("var(--accent)", `${number(held.size)} held by ${listed.length} requests`), swatch("var(--muted)", `${number(cachedCount)} cached, the darker the longer they stay`, 0.6), swatch("var(--line)", `${number(free)} free`), waiting ? make("span", { class: "muted", text: `${number(waiting)} requests wait for blocks` }) : null, told.left_out ? make("span", { class: "muted", text: `${number(told.left_out)} held or cached blocks are not shown` }) : null),
    canvas,
    make("div", { class: "legend" }, ...listed.slice(0, 24).map(([name, one]) => swatch(`hsl(${hue(name)} 52% ${dark ? 62 : 52}%)`, `${name} · ${one.blocks} blocks${one.status === "preempted" ? " · preempted" : ""}`))));
}

// ------------------------------------------------------------------ actors

function showActors(main) {
  const view = make("div", { class: "view" });
  main.replaceChildren(view);
  const state = (text, kind) => make("span", { class: `state ${kind}`, text });
  const kindOf = text => ({ ready: "good", alive: "good", draining: "warn", starting: "warn", restarting: "warn", dead: "bad" })[text] || "";
  return () => {
    if (!cluster) { view.replaceChildren(make("p", { class: "muted", text: "Waiting for the server." })); return; }
    const ingresses = cluster.ingresses.map(one => make("tr", {}, make("td", { text: one.name }), make("td", {}, state(one.state, kindOf(one.state))), make("td", { text: one.node }), make("td", { class: "num", text: one.pid }),
      make("td", { class: "num", text: one.ongoing }), make("td", { class: "num", text: number(one.queued_tokens) }), make("td", { text: duration(cluster.now - one.began) })));
    const engines = cluster.engines.map(one => {
      const fill = make("i");
      fill.style.width = `${100 * one.kv_usage}%`;
      return make("tr", {}, make("td", { text: one.id }), make("td", { text: `${one.device}, ${one.dtype}${one.quantization ? `, ${one.quantization}` : ""}, ${one.threads} threads` }),
        make("td", { class: "num", text: one.restarts }), make("td", { class: "num", text: one.running }), make("td", { class: "num", text: one.waiting }), make("td", {}, make("div", { class: "meter", title: percent(one.kv_usage) }, fill)),
        make("td", { class: "num", text: number(one.steps) }), make("td", { class: "num", text: one.step_s ? duration(one.step_s) : "–" }), make("td", { class: "num", text: number(one.preemptions) }));
    });
    const order = { Ingress: 0, Engine: 1, EngineCore: 2, Worker: 3 };
    const actors = [...cluster.actors].sort((a, b) => order[a.kind] - order[b.kind] || b.began - a.began).slice(0, 200).map(one => make("tr", {}, make("td", { text: one.kind }), make("td", {}, state(one.state, kindOf(one.state))), make("td", { text: one.node }), make("td", { class: "num", text: one.pid }),
      make("td", { class: "num", text: one.restarts }), make("td", { text: one.began ? clock(one.began) : "–" }), make("td", { class: "clip mono muted", text: one.name || "", title: one.name || "" })));
    view.replaceChildren(make("div", { class: "head" }, make("h1", { text: "Actors" }), make("span", { class: "muted", text: `RayLM ${cluster.version} · ${cluster.fingerprint}` }),
        cluster.dashboard ? make("a", { href: cluster.dashboard, target: "_blank", rel: "noopener", id: "dashboard", text: "Ray's dashboard" }) : null),
      panelOf("Ingresses", ["Replica", "State", "Node", ["Process"], ["Requests"], ["Queued tokens"], "Up for"], ingresses),
      panelOf("Engines", ["Engine", "Computes on", ["Restarts"], ["Running"], ["Waiting"], "KV cache", ["Steps"], ["Step time"], ["Preemptions"]], engines),
      actors.length ? panelOf("Processes, as Ray knows them", ["Kind", "State", "Node", ["Process"], ["Restarts"], "Since", "Name"], actors) : make("p", { class: "muted", text: cluster.sees === "all" ? "Ray does not run here." : "Processes are shown to the admin's key." }));
  };
}

function panelOf(title, titles, rows) {
  return make("section", { class: "panel" }, make("h2", { text: title }), rows.length ? make("div", { class: "scroll" }, table(titles, rows)) : make("p", { class: "muted", text: "None is ready." }));
}

// ------------------------------------------------------------------ shell

let update = null;

function show() {
  const [, name = "overview", id] = location.hash.split("/");
  const views = { overview: showOverview, requests: showRequests, memory: showMemory, actors: showActors, chat: showPlayground };
  const main = $("main"), view = views[name] || showOverview;
  for (const link of $("nav").children) {
    if (link.getAttribute("href") === `#/${views[name] ? name : "overview"}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  update = name === "requests" && id ? showRequest(main, decodeURIComponent(id)) : view(main);
  if (update) update();
}

function theme(name) {
  document.documentElement.dataset.theme = name;
}

theme(localStorage.getItem("raylm.theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
$("theme").addEventListener("click", () => {
  const other = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("raylm.theme", other);
  theme(other);
  if (update) update();
});
addEventListener("hashchange", show);
addEventListener("keydown", event => {
  if (event.target.matches("input, textarea, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  const place = ["1", "2", "3", "4", "5"].indexOf(event.key);
  if (place >= 0) $("nav").children[place].click();
  if (event.key === "/" && $("search")) { event.preventDefault(); $("search").focus(); }
});
show();
poll();
