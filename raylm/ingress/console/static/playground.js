// The playground: conversations with the model, kept in this browser alone.
import { CallError, base, call, duration, headers, make, refusal, save } from "./console.js";

const STORE = "raylm.conversations", SETTINGS = "raylm.settings", MOST = 100;
const KNOBS = [
  ["temperature", "Temperature", { min: 0, max: 2, step: 0.05 }], ["top_p", "Top p", { min: 0, max: 1, step: 0.01 }], ["top_k", "Top k", { min: 0, step: 1 }],
  ["max_tokens", "Most tokens", { min: 1, step: 1 }], ["presence_penalty", "Presence", { min: -2, max: 2, step: 0.1 }], ["frequency_penalty", "Frequency", { min: -2, max: 2, step: 0.1 }],
  ["seed", "Seed", { step: 1 }], ["min_p", "Min p", { min: 0, max: 1, step: 0.01 }],
];

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const settings = { model: "", system: "", tools: "", schema: "", logprobs: false, ...read(SETTINGS, {}) };
let talks = read(STORE, []), current = talks[0]?.id || null, running = null;

function keep() {
  try {
    localStorage.setItem(STORE, JSON.stringify(talks.slice(0, MOST)));
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch { /* the browser's store is full: this conversation lives as long as the page */ }
}

const unique = () => `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
const talk = () => talks.find(one => one.id === current);

function begin() {
  const fresh = { id: unique(), title: "New conversation", messages: [] };
  talks.unshift(fresh);
  current = fresh.id;
  return fresh;
}

// ------------------------------------------------------------------ one answer

function parsed(text, what) {
  if (!text.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new CallError(`${what}: ${error.message}`, 0);
  }
}

function body(messages) {
  const asked = { stream: true, stream_options: { include_usage: true }, messages: [] };
  if (settings.model) asked.model = settings.model;
  if (settings.system.trim()) asked.messages.push({ role: "system", content: settings.system });
  for (const message of messages) {
    const sent = { role: message.role, content: message.text };
    if (message.calls?.length) sent.tool_calls = message.calls.map(one => ({ id: one.id, type: "function", function: { name: one.name, arguments: one.arguments } }));
    if (message.role === "tool") sent.tool_call_id = message.callId;
    asked.messages.push(sent);
  }
  for (const [name] of KNOBS) if (settings[name] !== undefined && settings[name] !== "") asked[name] = Number(settings[name]);
  const tools = parsed(settings.tools, "Tools"), schema = parsed(settings.schema, "Schema");
  if (tools) asked.tools = tools;
  if (schema) asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (settings.logprobs) Object.assign(asked, { logprobs: true, top_logprobs: 3 });
  return asked;
}

async function* events(answer) {
  const reader = answer.body.getReader(), decoder = new TextDecoder();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += decoder.decode(value, { stream: true });
    for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
      const block = held.slice(0, end);
      held = held.slice(end + 2);
      const data = block.split("\n").filter(line => line.startsWith("data:")).map(line => line.slice(5).trimStart()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function take(message, event, at) {
  if (event.error) throw new CallError(event.error.message, 0);
  const choice = event.choices?.[0], delta = choice?.delta || {};
  if (event.usage) message.tokens = event.usage.completion_tokens;
  if (!choice) return;
  const thought = delta.reasoning_content || delta.reasoning || "";
  if (thought) message.thoughts = (message.thoughts || "") + thought;
  if (delta.content) message.text += delta.content;
  for (const one of delta.tool_calls || []) {
    message.calls ||= [];
    const known = message.calls[one.index] ||= { id: "", name: "", arguments: "" };
    if (one.id) known.id = one.id;
    if (one.function?.name) known.name = one.function.name;
    known.arguments += one.function?.arguments || "";
  }
  for (const one of choice.logprobs?.content || []) {
    message.logprobs ||= [];
    message.logprobs.push([one.token, one.logprob, (one.top_logprobs || []).map(other => [other.token, other.logprob])]);
  }
  if ((thought || delta.content || delta.tool_calls) && message.first === undefined) message.first = at;
  if (choice.finish_reason) message.finish = choice.finish_reason;
}

async function answer(conversation, redraw) {
  const message = { id: unique(), role: "assistant", text: "" };
  const began = performance.now(), stop = new AbortController();
  conversation.messages.push(message);
  running = { stop, message };
  redraw(true);
  try {
    const asked = body(conversation.messages.slice(0, -1));
    const got = await fetch(new URL("v1/chat/completions", base), {
      method: "POST", body: JSON.stringify(asked), signal: stop.signal, headers: headers({ "content-type": "application/json" }),
    });
    message.request = got.headers.get("x-request-id");
    if (!got.ok) throw await refusal(got);
    for await (const event of events(got)) {
      take(message, event, (performance.now() - began) / 1000);
      redraw(false);
    }
  } catch (error) {
    if (error.name === "AbortError") message.finish = "stopped";
    else message.error = error.message || "The connection was lost.";
  }
  message.took = (performance.now() - began) / 1000;
  running = null;
  keep();
  redraw(true);
}

// ------------------------------------------------------------------ the view

export function showPlayground(main) {
  const list = make("aside", { class: "side left", "aria-label": "Conversations" });
  const inner = make("div"), scroll = make("div", { class: "messages", id: "messages" }, inner);
  const input = make("textarea", { id: "prompt", rows: "1", placeholder: "Ask something. Enter sends, Shift and Enter makes a new line.", "aria-label": "Message" });
  const send = make("button", { class: "primary", type: "button", id: "send", text: "Send" });
  const view = make("div", { class: "play" });
  const toggles = make("div", { class: "row narrow" },
    make("button", { class: "quiet", type: "button", text: "Conversations", on: { click: () => view.classList.toggle("show-talks") } }),
    make("button", { class: "quiet", type: "button", text: "Settings", on: { click: () => view.classList.toggle("show-settings") } }));
  view.append(list, make("section", { class: "stage" }, toggles, scroll, make("div", { class: "composer" }, make("div", {}, input, send))), settingsPanel());
  main.replaceChildren(view);
  const shown = new Map();  // by message id: its element and what it shows
  let waiting = false;

  function redraw(whole) {
    if (!view.isConnected) return;
    if (whole) { draw(); return; }
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawMessages(); });
  }

  function draw() {
    send.textContent = running ? "Stop" : "Send";
    send.classList.toggle("primary", !running);
    list.replaceChildren(make("button", { type: "button", text: "New conversation", on: { click: () => { if (!running) { begin(); draw(); input.focus(); } } } }), ...talks.map(talkRow));
    drawMessages();
  }

  function talkRow(one) {
    return make("div", { class: "talk", "aria-current": one.id === current ? "true" : null },
      make("button", { type: "button", class: "name", text: one.title, title: one.title, on: { click: () => { current = one.id; view.classList.remove("show-talks"); shown.clear(); draw(); } } }),
      make("button", { type: "button", class: "quiet", text: "×", "aria-label": `Delete ${one.title}`, on: { click: () => { talks = talks.filter(other => other !== one); if (current === one.id) current = talks[0]?.id || null; keep(); draw(); } } }));
  }

  function drawMessages() {
    const messages = talk()?.messages || [], near = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 80;
    if (!messages.length) {
      inner.replaceChildren(make("div", { class: "empty" }, make("h1", { text: "Talk to the model" }), make("p", { text: "What you write stays in this browser; only the model sees it." })));
      return;
    }
    const elements = messages.map((message, place) => {
      const state = JSON.stringify([message, settings.logprobs, running?.message === message]);
      const known = shown.get(message.id);
      if (known?.state === state) return known.element;
      const element = messageElement(message, place);
      const open = known?.element.querySelector("details")?.open;
      if (open !== undefined && element.querySelector("details")) element.querySelector("details").open = open;
      shown.set(message.id, { element, state });
      return element;
    });
    if (elements.length !== inner.children.length || elements.some((element, place) => inner.children[place] !== element)) inner.replaceChildren(...elements);
    if (near) scroll.scrollTop = scroll.scrollHeight;
  }

  function messageElement(message, place) {
    const mine = message.role === "user", busy = running?.message === message;
    const made = make("article", { class: `message ${message.role}`, "aria-busy": busy ? "true" : null });
    made.append(make("div", { class: "who", text: { user: "You", assistant: "Model", tool: `Result of ${message.name || "the tool"}` }[message.role] || message.role }));
    if (message.thoughts) made.append(make("details", {}, make("summary", { text: busy && !message.text ? "Thinking" : "Thoughts" }), make("div", { class: "text thoughts", text: message.thoughts })));
    made.append(message.logprobs?.length && !mine ? coloured(message) : make("div", { class: "text", text: message.text + (busy ? " ▍" : "") }));
    for (const one of message.calls || []) if (one) made.append(make("pre", { text: `${one.name}(${one.arguments})` }), busy ? null : make("div", { class: "row" }, resultButton(message, one)));
    if (message.error) made.append(make("p", { class: "error", text: message.error }));
    if (!busy) made.append(under(message, place, mine));
    return made;
  }

  function resultButton(message, one) {
    return make("button", { type: "button", text: "Give its result", on: { click: () => {
      const text = prompt(`Result of ${one.name}`);
      if (text === null) return;
      talk().messages.push({ id: unique(), role: "tool", name: one.name, callId: one.id, text });
      const answered = talk().messages.filter(other => other.role === "tool").map(other => other.callId);
      if (message.calls.every(other => answered.includes(other.id))) answer(talk(), redraw);
      else draw();
    } } });
  }

  function coloured(message) {
    const text = make("div", { class: "text" });
    for (const [token, logprob, others] of message.logprobs) {
      const chance = Math.exp(logprob), level = chance > 0.9 ? 0 : chance > 0.6 ? 1 : chance > 0.3 ? 2 : chance > 0.1 ? 3 : 4;
      const title = [[token, logprob], ...others.filter(other => other[0] !== token)].map(([name, value]) => `${JSON.stringify(name)} ${(100 * Math.exp(value)).toFixed(1)} %`).join("\n");
      text.append(make("span", { class: `token t${level}`, text: token, title }));
    }
    return text;
  }

  function under(message, place, mine) {
    const row = make("div", { class: "under" });
    const button = (text, action) => make("button", { type: "button", class: "quiet", text, on: { click: () => { if (!running) action(); } } });
    const conversation = talk();
    if (mine) row.append(button("Edit", () => { input.value = message.text; conversation.messages.splice(place); grow(); draw(); input.focus(); }));
    else if (message.role === "assistant") row.append(button("Retry", () => { conversation.messages.splice(place); answer(conversation, redraw); }));
    row.append(button("Copy", () => navigator.clipboard?.writeText(message.text)));
    if (message.role === "assistant") {
      const speed = message.tokens > 1 && message.took > message.first ? (message.tokens - 1) / (message.took - message.first) : null;
      const said = [message.first !== undefined ? `first token ${duration(message.first)}` : "", message.tokens ? `${message.tokens} tokens` : "", speed ? `${speed.toFixed(1)} tokens/s` : "", message.finish && message.finish !== "stop" ? message.finish : ""];
      row.append(make("span", { class: "speed", text: said.filter(Boolean).join(" · ") }));
      if (message.request) row.append(make("a", { href: `#/requests/${encodeURIComponent(message.request)}`, text: "Timeline" }));
    }
    return row;
  }

  function grow() {
    input.style.height = "auto";
    input.style.height = `${Math.min(input.scrollHeight + 2, innerHeight * 0.4)}px`;
  }

  function submit() {
    if (running) { running.stop.abort(); return; }
    const text = input.value.trim();
    if (!text) return;
    const conversation = talk() || begin();
    if (!conversation.messages.length) conversation.title = text.slice(0, 60);
    conversation.messages.push({ id: unique(), role: "user", text });
    input.value = "";
    grow();
    keep();
    scroll.scrollTop = scroll.scrollHeight;
    answer(conversation, redraw);
  }

  send.addEventListener("click", submit);
  input.addEventListener("input", grow);
  input.addEventListener("keydown", event => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); if (!running) submit(); }
    if (event.key === "Escape" && running) running.stop.abort();
  });
  draw();
  input.focus({ preventScroll: true });
  return null;
}

// ------------------------------------------------------------------ settings and export

function settingsPanel() {
  const panel = make("aside", { class: "side right", "aria-label": "Settings" });
  const change = name => ({ input: event => { settings[name] = event.target.type === "checkbox" ? event.target.checked : event.target.value; keep(); } });
  const area = (name, label, placeholder, rows) => {
    const field = make("textarea", { id: `set-${name}`, rows: String(rows), placeholder, spellcheck: "false", on: change(name) });
    field.value = settings[name] || "";
    return make("label", {}, label, field);
  };
  const models = make("select", { id: "set-model", on: { change: event => { settings.model = event.target.value; keep(); } } });
  call("v1/models").then(told => {
    models.replaceChildren(...told.data.map(one => make("option", { value: one.id, text: one.id })));
    if (!told.data.some(one => one.id === settings.model)) settings.model = told.data[0]?.id || "";
    models.value = settings.model;
  }, () => {});
  const knobs = KNOBS.map(([name, label, bounds]) => {
    const field = make("input", { type: "number", id: `set-${name}`, placeholder: "default", ...bounds, on: change(name) });
    field.value = settings[name] ?? "";
    return make("label", {}, label, field);
  });
  const shown = make("input", { type: "checkbox", id: "set-logprobs", on: { change: event => { settings.logprobs = event.target.checked; keep(); } } });
  shown.checked = settings.logprobs;
  panel.append(
    make("div", { class: "head" }, make("h2", { text: "Settings" }), make("button", { class: "quiet narrow", type: "button", text: "Close", on: { click: event => event.target.closest(".play").classList.remove("show-settings") } })),
    make("label", {}, "Model", models), area("system", "System prompt", "How the model shall behave", 3), make("div", { class: "two" }, ...knobs),
    make("label", { class: "check" }, shown, "Colour tokens by their probability"),
    area("tools", "Tools (JSON array)", '[{"type": "function", "function": {"name": "…"}}]', 3), area("schema", "Schema of the answer (JSON)", '{"type": "object", "properties": {}}', 3),
    make("div", { class: "row" }, make("button", { type: "button", text: "Export JSON", on: { click: () => talk() && save("conversation.json", JSON.stringify({ settings, ...talk() }, null, 2)) } }),
      make("button", { type: "button", text: "Export text", on: { click: () => talk() && save("conversation.md", markdown(talk()), "text/markdown") } })));
  return panel;
}

function markdown(conversation) {
  return [`# ${conversation.title}`, ...conversation.messages.map(message => `**${message.role}**\n\n${message.text}`)].join("\n\n");
}
