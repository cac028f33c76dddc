// What a page without scripts cannot do: times in the viewer's zone, live parts, keys, the heat map's hints, plots.
"use strict";

// ---- times ----
const DAY = new Intl.DateTimeFormat("sv-SE", {year: "numeric", month: "2-digit", day: "2-digit"});
const CLOCK = new Intl.DateTimeFormat("sv-SE", {hour: "2-digit", minute: "2-digit"});
const FULL = new Intl.DateTimeFormat(document.documentElement.lang, {dateStyle: "full", timeStyle: "long"});

function localTimes(root) {
  const today = DAY.format(new Date());
  for (const one of root.querySelectorAll("time[datetime]:not([title])")) {
    const moment = new Date(one.dateTime);
    const day = DAY.format(moment);
    one.textContent = (day === today ? "" : (day.slice(0, 4) === today.slice(0, 4) ? day.slice(5) : day) + " ") + CLOCK.format(moment);
    one.title = FULL.format(moment);
  }
}

// ---- live parts: what the browser has already is not sent again, and what somebody types is not taken from them ----
const live = document.getElementById("live");
const held = new Set(); // parts that are being filled in, and not as they are now
let connected = false;

// What the page says of itself: while a part waits for who fills it in, not all of it is live.
function tell() {
  if (!connected) return;
  const waits = [...held].some(part => part.isConnected), said = document.body.dataset[waits ? "saidHeld" : "saidLive"];
  live.className = waits ? "live held" : "live on";
  if (live.textContent !== said) live.textContent = said;
}

function edited(field) {
  if (field.localName === "select")
    return field.selectedIndex !== Math.max(0, [...field.options].findIndex(one => one.defaultSelected));
  return field.matches("[type=checkbox], [type=radio]") ? field.checked !== field.defaultChecked : field.value !== field.defaultValue;
}

// Where an element is, so that what is in its place after an update can be found.
function placeOf(one) {
  const room = one.closest("[id]");
  return {room: room.id, tag: one.localName, number: [...room.getElementsByTagName(one.localName)].indexOf(one)};
}

function at(place) {
  const room = document.getElementById(place.room);
  return place.number < 0 ? room : room?.getElementsByTagName(place.tag)[place.number];
}

// The rows that stay as they are get their places in what came. One that is gone there goes with what was typed: there is
// nothing left to send it to, and a part that waited for it would never change again. False: a field is in no row.
function keepRows(target, fragment) {
  const rows = new Set([...target.querySelectorAll("input, select, textarea")].filter(edited).map(one => one.closest("[data-v]")));
  if (rows.has(null)) return false;
  for (const row of rows) fragment.querySelector(`#${CSS.escape(row.id)}`)?.replaceWith(row);
  for (const stub of fragment.querySelectorAll("[data-keep]")) {
    const mine = document.getElementById(stub.id);
    if (mine) stub.replaceWith(mine);
  }
  return true;
}

htmx.defineExtension("pieces", {
  onEvent(name, event) {
    if (name !== "htmx:configRequest") return true;
    const have = [...event.detail.target.querySelectorAll("[data-v]")].map(one => `${one.id}.${one.dataset.v}`);
    if (have.length) event.detail.headers["X-Have"] = have.join(" ");
    return true;
  },
  isInlineSwap: style => style === "pieces",
  handleSwap(style, target, fragment) {
    if (style !== "pieces") return false;
    const made = fragment.firstElementChild;
    if (!made) return false;
    const active = target.contains(document.activeElement) ? document.activeElement : null;
    const open = [...target.querySelectorAll("details[open]")].map(placeOf), focused = active && placeOf(active);
    // A form that has the focus is not even moved: that closes lists, ends input methods, and loses clicks.
    if (active?.closest("form") || !keepRows(target, fragment)) {
      held.add(target);
      tell();
      return [target];
    }
    held.delete(target);
    tell();
    for (const one of [...target.attributes]) if (!made.hasAttribute(one.name)) target.removeAttribute(one.name);
    for (const one of made.attributes) target.setAttribute(one.name, one.value);
    target.replaceChildren(...made.childNodes); // the element stays, and with it who listens and where the reader is
    for (const place of open) at(place)?.setAttribute("open", "");
    if (focused) at(focused)?.focus({preventScroll: true});
    return [target];
  },
});

const LOOK_MS = 3000, QUIET_MS = 45000; // the server says something every 15 s
let stream = null, heard = 0;
const due = new Map(), last = new WeakMap();

function refresh(part, wait) {
  if (due.has(part)) return;
  due.set(part, setTimeout(() => {
    due.delete(part);
    last.set(part, Date.now());
    if (part.isConnected) htmx.trigger(part, "sluice-refresh");
  }, wait));
}

const pace = part => part.dataset.pace * 1000;

// Each live part is asked for soon after a change, and not more often than its pace; the last change is never lost.
function wake(topic) {
  heard = Date.now();
  for (const part of document.querySelectorAll(`[data-topics~="${topic}"]`))
    refresh(part, Math.max(300, (last.get(part) ?? -Infinity) + pace(part) - Date.now()));
}

document.addEventListener("htmx:afterRequest", event => {
  const part = event.detail.elt;
  if (!event.detail.successful && part.matches("[data-topics]")) refresh(part, pace(part));
});

document.addEventListener("focusout", () => held.forEach(part => refresh(part, 300)));

function topicsOfPage() {
  return new Set([...document.querySelectorAll("[data-topics]")].flatMap(one => one.dataset.topics.split(" ")));
}

function follow() {
  const topics = topicsOfPage();
  if (!live || !topics.size || document.hidden || stream) return;
  stream = new EventSource(`/api/v1/stream?rows=false&topics=${[...topics].join(",")}`);
  heard = Date.now();
  let lost = false;
  stream.onopen = () => {
    connected = true;
    tell();
    lost = false;
    topics.forEach(wake); // it does not tell what changed between the making of the page, or the loss, and now
  };
  stream.onerror = () => {
    connected = false;
    if (!lost) live.textContent = `${document.body.dataset.saidLost} ${CLOCK.format(new Date())}`;
    live.className = "live lost";
    lost = true;
    if (stream.readyState === EventSource.CLOSED) {
      stream = null;
      setTimeout(follow, 10000);
    }
  };
  stream.addEventListener("reset", () => topics.forEach(wake));
  stream.addEventListener("quiet", () => heard = Date.now());
  for (const topic of topics) stream.addEventListener(topic, () => wake(topic));
}

// A connection can be gone without anybody having been told, as after a sleep or behind a router that was restarted.
setInterval(() => {
  if (!stream || Date.now() - heard < QUIET_MS) return;
  stream.close();
  stream = null;
  follow();
}, LOOK_MS);

document.addEventListener("visibilitychange", () => {
  if (document.hidden) { // a browser has few connections to a host for all its tabs
    stream?.close();
    stream = null;
  } else {
    topicsOfPage().forEach(wake);
    follow();
  }
});

// ---- keys ----
let after = 0;
document.addEventListener("keydown", event => {
  const field = event.target.closest("input, textarea, select, [contenteditable]");
  if (event.key === "Escape" && field?.id === "q") field.blur();
  if (field || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "/") {
    event.preventDefault();
    document.getElementById("q")?.focus();
  } else if (event.key === "?") {
    document.getElementById("keys")?.showModal();
  } else if (event.key === "g") {
    after = Date.now();
  } else if (Date.now() - after < 1500) {
    after = 0;
    document.querySelector(`.menu [data-key="${CSS.escape(event.key)}"]`)?.click();
  }
});

document.addEventListener("click", event => {
  const opener = event.target.closest("[data-open]");
  if (opener) document.getElementById(opener.dataset.open)?.showModal();
  const copier = event.target.closest("[data-copy]");
  if (copier) {
    navigator.clipboard?.writeText(document.getElementById(copier.dataset.copy).textContent);
    copier.dataset.done = "";
    setTimeout(() => delete copier.dataset.done, 1500);
  }
  const cell = heatCell(event);
  if (cell) location.assign(`/nodes/${encodeURIComponent(cell.node)}`);
  const suggestions = document.getElementById("suggestions");
  if (suggestions && !event.target.closest(".search")) suggestions.replaceChildren();
});

// A form that was sent is not sent again by a second click.
document.addEventListener("submit", event => {
  const form = event.target;
  if (form.method !== "post") return;
  if (form.dataset.sure && !form.dataset.asked && !confirm(form.dataset.sure)) {
    event.preventDefault();
    return;
  }
  if (form.dataset.sent) event.preventDefault();
  form.dataset.sent = "1";
  setTimeout(() => delete form.dataset.sent, 3000);
});

// ---- the heat map: which node and GPU the pointer is at ----
function heatCell(event) {
  const map = event.target.closest?.("svg[data-nodes]");
  if (!map) return null;
  const box = map.getBoundingClientRect(), view = map.viewBox.baseVal;
  const pitch = Number(map.dataset.pitch);
  const row = Math.floor((event.clientY - box.top) / box.height * view.height / pitch);
  const node = map.dataset.nodes.split(" ")[row];
  return node ? {node, gpu: Math.floor((event.clientX - box.left) / box.width * view.width / pitch)} : null;
}

document.addEventListener("pointermove", event => {
  const cell = heatCell(event), hint = document.getElementById("heat-hint");
  if (hint) hint.textContent = cell ? `${cell.node} · GPU ${cell.gpu}` : hint.dataset.usual;
});

// ---- plots: of a table's columns; the table stays for those who read it ----
function plots(root) {
  if (typeof uPlot === "undefined") return;
  for (const figure of root.querySelectorAll("figure[data-plot]:not([data-done])")) {
    const table = document.getElementById(figure.dataset.plot);
    const rows = [...table.tBodies[0].rows];
    if (rows.length < 2) continue;
    figure.dataset.done = "1";
    const color = name => { // as it is in this theme
      figure.style.color = `var(${name})`;
      const found = getComputedStyle(figure).color;
      figure.style.color = "";
      return found;
    };
    const titles = [...table.tHead.rows[0].cells].map(one => one.textContent);
    const value = cell => cell.dataset.value === undefined || cell.dataset.value === "" ? null : Number(cell.dataset.value);
    const data = titles.map((_, at) => rows.map(row => value(row.cells[at])));
    const moment = at => (figure.dataset.time === "day" ? DAY : CLOCK).format(new Date(at * 1000));
    const timed = figure.dataset.time ? {values: (_, ticks) => ticks.map(at => figure.dataset.time === "day" ? moment(at).slice(5) : moment(at))} : {};
    const axis = {stroke: color("--dim"), grid: {stroke: color("--line"), width: 1}, ticks: {stroke: color("--line")}};
    const width = () => Math.max(240, figure.clientWidth);
    const plot = new uPlot({
      width: width(), height: 240,
      scales: {x: {time: Boolean(figure.dataset.time)}, y: {range: (_, low, high) => [Math.min(0, low ?? 0), (high || 1) * 1.05]}},
      axes: [{...axis, ...timed}, {...axis, label: figure.dataset.unit, size: (_, ticks) => Math.max(60, 24 + 8 * Math.max(0, ...(ticks ?? []).map(one => one.length)))}],
      series: titles.map((label, at) => at ? {
        label, stroke: color(`--plot-${at}`), width: 2, dash: at === 2 ? [6, 4] : at === 3 ? [2, 3] : undefined,
        fill: titles.length === 2 ? color("--plot-fill") : undefined, points: {show: rows.length < 60},
      } : {label, value: (_, at) => at === null || at === undefined ? "–" : figure.dataset.time ? moment(at) : at}),
    }, data, figure);
    new ResizeObserver(() => plot.setSize({width: width(), height: 240})).observe(figure);
  }
}

document.addEventListener("htmx:load", event => {
  localTimes(event.detail.elt);
  plots(event.detail.elt);
});
localTimes(document);
document.querySelector(".menu [aria-current]")?.scrollIntoView({block: "nearest", inline: "center"}); // on a phone it may be beyond the edge
plots(document);
follow();
