"use strict";
// Shows the figures that server-sent events bring. Nodes are made once and then changed, and a text is only touched
// where it is another, so that a page that is open for days neither grows nor keeps a machine busy.

const POINTS_MAX = 600;
const RATIO_SPAN_S = 10; // a point of the chart is the ratio of the ten seconds before it
const MINUTE_S = 60;
const STALE_S = 5;
const WIDTH = 600;
const HEIGHT = 200;
const PARTS = ["pinned", "in_flight", "evictable", "free"];
const TIERS = ["device", "host", "storage"];
const WORDS = { in_flight: "in flight" };

const byId = (id) => document.getElementById(id);
const count = (value) => Math.round(value).toLocaleString("en");
const percent = (ratio) => (100 * ratio).toFixed(1) + "%";
const seconds = (value) => (value < 1 ? (1000 * value).toFixed(1) + " ms" : value.toFixed(2) + " s");

const clock = (atS) => new Date(1000 * atS).toLocaleTimeString("en-GB");

function bytes(value) {
  const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let name = 0;
  while (value >= 1024 && name < names.length - 1) { value /= 1024; name += 1; }
  return (name ? value.toFixed(value < 10 ? 2 : 1) : Math.round(value)) + " " + names[name];
}

function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

function made(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text) node.textContent = text;
  return node;
}

// Shows a number; what it is exactly stays with it, for those who read the page by program.
function figure(node, key, value, shown) {
  if (node.dataset.figure !== key) node.dataset.figure = key;
  const exact = String(value);
  if (node.dataset.exact !== exact) node.dataset.exact = exact;
  say(node, shown);
}

// Keeps as many children as there are keys, each made once by make(key).
function keyed(parent, keys, make) {
  const signature = keys.join("\n");
  if (parent.keyed === signature) return parent.kept;
  const before = parent.kept || new Map();
  const kept = new Map(keys.map((key) => [key, before.get(key) || make(key)]));
  parent.replaceChildren(...[...kept.values()].map((each) => each.root));
  parent.keyed = signature;
  parent.kept = kept;
  return kept;
}

// ---- tables ------------------------------------------------------------------------------------------------------

// Shows rows, each [key, cells]; a cell is a text, or [figure's name, exact value, text].
function table(id, columns, rows, nothing) {
  const node = byId(id);
  if (!node.bodyPart) {
    const head = made("tr");
    for (const column of columns) {
      const cell = made("th", "", column);
      cell.scope = "col";
      head.append(cell);
    }
    node.emptyNote = made("caption", "", nothing);
    node.headPart = made("thead");
    node.headPart.append(head);
    node.bodyPart = made("tbody");
    node.append(node.emptyNote, node.headPart, node.bodyPart);
  }
  node.emptyNote.hidden = rows.length > 0;
  node.headPart.hidden = rows.length === 0;
  const kept = keyed(node.bodyPart, rows.map((row) => row[0]), () => {
    const root = made("tr");
    const cells = columns.map((_, number) => made(number ? "td" : "th"));
    cells[0].scope = "row";
    root.append(...cells);
    return { root, cells };
  });
  for (const [key, cells] of rows) {
    cells.forEach((cell, number) => {
      const shown = kept.get(key).cells[number];
      if (typeof cell === "string") say(shown, cell);
      else figure(shown, cell[0], cell[1], cell[2]);
    });
  }
}

// ---- tiers -------------------------------------------------------------------------------------------------------

function newComponent(held) {
  const root = made("div", "component");
  const bar = made("div", "bar " + held.tier);
  bar.setAttribute("aria-hidden", "true");
  const parts = PARTS.slice(0, 3).map((part) => made("i", part));
  bar.append(...parts);
  const list = made("dl");
  const cells = new Map();
  for (const name of ["used", ...PARTS, "capacity", "evicted"]) {
    const pair = made("div");
    const value = made("dd");
    pair.append(made("dt", "", WORDS[name] || name), value);
    list.append(pair);
    cells.set(name, value);
  }
  root.append(made("h4", "", held.component), bar, list);
  return { root, parts, cells };
}

function showComponents(components) {
  const tiers = [...new Set(components.map((held) => held.tier))];
  const groups = keyed(byId("components"), tiers, (tier) => {
    const root = made("div");
    const body = made("div");
    root.append(made("h3", "", tier), body);
    return { root, body };
  });
  for (const tier of tiers) {
    const own = components.filter((held) => held.tier === tier);
    const kept = keyed(groups.get(tier).body, own.map((held) => held.component), (name) => newComponent(own.find((held) => held.component === name)));
    for (const held of own) {
      const { parts, cells } = kept.get(held.component);
      parts.forEach((part, number) => {
        const width = (100 * held[PARTS[number]]) / held.capacity + "%";
        if (part.style.width !== width) part.style.width = width;
      });
      const prefix = held.tier + "." + held.component + ".";
      const used = (held.capacity - held.free) / held.capacity;
      figure(cells.get("used"), prefix + "used", used, percent(used));
      for (const name of [...PARTS, "capacity"]) figure(cells.get(name), prefix + name, held[name], count(held[name]));
      figure(cells.get("evicted"), prefix + "evicted", held.evicted, count(held.evicted));
    }
  }
}

// ---- the last minutes --------------------------------------------------------------------------------------------

let points = []; // [time, lookups, device, host, prefetched, storage, missed, bytes of each link...], totals

function addPoint(point) {
  const last = points[points.length - 1];
  if (last && point[0] <= last[0]) return false;
  if (last && point[1] < last[1]) points = []; // another process answers here now
  points.push(point);
  if (points.length > POINTS_MAX) points.splice(0, points.length - POINTS_MAX);
  return true;
}

// What came in the seconds before a point, field by field: seconds first.
function cameBefore(at, span) {
  let from = at;
  while (from > 0 && points[at][0] - points[from][0] < span) from -= 1;
  return points[at].map((total, number) => total - points[from][number]);
}

// Ratios by tier in the seconds before a point; null where nothing was looked up.
function ratiosAt(at, span = RATIO_SPAN_S) {
  const [, , device, host, prefetched, storage, missed] = cameBefore(at, span);
  const asked = device + host + storage + missed;
  const own = Math.max(0, host - prefetched);
  return asked > 0 ? [device / asked, own / asked, (host - own + storage) / asked] : null;
}

// Look-ups and bytes of each link per second, over the last minute or what there is of it.
function ratesInTheLastMinute() {
  const [passed, lookups, , , , , , ...links] = cameBefore(points.length - 1, MINUTE_S);
  return { lookups: passed > 0 ? lookups / passed : 0, links: links.map((each) => (passed > 0 ? each / passed : 0)) };
}

function drawHits() {
  const end = points[points.length - 1][0];
  const begin = Math.min(points[0][0], end - 60);
  const x = (at) => ((WIDTH * (points[at][0] - begin)) / (end - begin)).toFixed(1);
  const tops = [[], [], []];
  points.forEach((_, at) => {
    let sum = 0;
    (ratiosAt(at) || [0, 0, 0]).forEach((ratio, tier) => {
      sum += ratio;
      tops[tier].push(x(at) + " " + (HEIGHT * (1 - Math.min(1, sum))).toFixed(1));
    });
  });
  TIERS.forEach((tier, number) => {
    byId("hits-" + tier).setAttribute("d", "M" + x(0) + " " + HEIGHT + "L" + tops[number].join("L") + "L" + WIDTH + " " + HEIGHT + "Z");
  });
  say(byId("oldest"), ago(end - begin));
}

function ago(value) {
  return value < 90 ? Math.round(value) + " s ago" : Math.round(value / 60) + " min ago";
}

const look = byId("look");
let looksAtNow = true;

function showMoment() {
  const at = Math.min(points.length - 1, Number(look.value));
  const passed = points[points.length - 1][0] - points[at][0];
  const ratios = ratiosAt(at);
  const when = passed < 1 ? "now" : ago(passed);
  const said = ratios ? TIERS.map((tier, number) => tier + " " + percent(ratios[number])).join(", ") : "nothing was looked up";
  const end = points[points.length - 1][0];
  const begin = Math.min(points[0][0], end - 60);
  const place = (WIDTH * (points[at][0] - begin)) / (end - begin);
  byId("cursor").setAttribute("x1", place);
  byId("cursor").setAttribute("x2", place);
  look.setAttribute("aria-valuetext", when + ": " + said);
  say(byId("reading"), when + ": " + said);
}

look.addEventListener("input", () => {
  looksAtNow = Number(look.value) >= points.length - 1;
  showMoment();
});

function showHistory() {
  const before = Number(look.max);
  look.max = String(points.length - 1);
  if (looksAtNow) look.value = look.max;
  else if (points.length - 1 === before) look.value = String(Math.max(0, Number(look.value) - 1)); // the moment moves on
  drawHits();
  showMoment();
}

// ---- everything else ---------------------------------------------------------------------------------------------

function showTiles(figures, perS) {
  const ratios = ratiosAt(points.length - 1, MINUTE_S) || [0, 0, 0];
  const store = figures.store === null ? "none" : figures.store.breaker || "attached";
  const tiles = [
    ["hit ratio", percent(ratios[0] + ratios[1] + ratios[2])],
    ["from the device", percent(ratios[0])],
    ["from the host", percent(ratios[1])],
    ["from storage", percent(ratios[2])],
    ["look-ups per second", perS.lookups.toFixed(1)],
    ["moved per second", bytes(perS.links.reduce((sum, each) => sum + each, 0))],
    ["under way", count(figures.operations_live)],
    ["store", store],
  ];
  const kept = keyed(byId("tiles"), tiles.map((tile) => tile[0]), (name) => {
    const root = made("div");
    const value = made("dd");
    root.append(made("dt", "", name), value);
    return { root, value };
  });
  for (const [name, text] of tiles) say(kept.get(name).value, text);
  kept.get("store").value.className = ["open", "half open"].includes(store) ? "alarm" : "";
}

function showStore(store) {
  const node = byId("store-state");
  if (!node.words) {
    node.words = made("strong");
    node.rest = document.createTextNode("");
    node.append(node.words, node.rest);
  }
  const breaker = store === null ? "none attached" : store.breaker === null ? "attached, without a guard" : "breaker " + store.breaker;
  say(node.words, breaker);
  node.words.className = store !== null && ["open", "half open"].includes(store.breaker) ? "alarm" : "";
  const facts = store === null ? [] : [
    count(store.refused_calls) + " calls refused", count(store.retried_calls) + " made again",
    count(store.stuck_calls) + " not returned", count(store.flawed_pages) + " flawed pages",
  ];
  const rest = facts.length ? ": " + facts.join(", ") : "";
  if (node.rest.data !== rest) node.rest.data = rest;
  const answers = store === null ? [] : store.answers;
  table("store", ["method", "answer", "objects"], answers.map((each) => [
    each.method + " " + each.answer,
    [each.method, each.answer, ["store." + each.method + "." + each.answer, each.count, count(each.count)]],
  ]), "No object was asked for.");
}

function show(figures) {
  say(byId("name"), figures.name);
  const title = figures.name + " · unified-cache live";
  if (document.title !== title) document.title = title;
  say(byId("moment"), "figures of " + clock(figures.counted_at_s));
  byId("moment").dataset.countedAt = figures.counted_at_s;
  const perS = ratesInTheLastMinute();
  showTiles(figures, perS);
  showComponents(figures.components);
  table("links", ["way", "pages", "bytes", "last minute"], figures.links.map((link, number) => [link.name, [
    link.name, ["links." + link.name + ".pages", link.pages, link.pages === null ? "" : count(link.pages)], ["links." + link.name + ".bytes", link.bytes, bytes(link.bytes)],
    bytes(perS.links[number]) + "/s",
  ]]), "Nothing was moved.");
  const found = figures.found;
  table("found", ["found", "pages"], [
    ["look-ups", "lookups"], ["on the device", "device"], ["on the host", "host"], ["brought there from storage", "prefetched"],
    ["in storage", "storage"], ["missed", "missed"],
  ].filter(([, name]) => name !== (figures.kind === "cache" ? "storage" : "prefetched")).map(([words, name]) => [name, [words, ["found." + name, found[name], count(found[name])]]]), "");
  showStore(figures.store);
  table("operations", ["kind", "done", "partial", "failed", "cancelled", "declined"], figures.operations.map((each) => [each.kind, [
    each.kind, ...["done", "partial", "failed", "cancelled", "declined"].map((name) => ["operations." + each.kind + "." + name, each[name], count(each[name])]),
  ]]), "None has ended.");
  table("slowest", ["kind", "took", "pages", "outcome", "ended"], figures.slowest.map((each, number) => [String(number), [
    each.kind, seconds(each.seconds), each.pages === null ? "" : count(each.pages), each.outcome, clock(each.ended_at_s),
  ]]), "None has ended in the last minutes.");
  byId("tenants-card").hidden = figures.tenants === null;
  if (figures.tenants !== null) {
    table("tenants", ["tenant", "running", "waiting", "in flight", "stored"], figures.tenants.map((each) => [each.tenant, [
      each.tenant, count(each.running_calls), count(each.waiting_calls), bytes(each.bytes_in_flight),
      ["tenants." + each.tenant + ".stored", each.stored_bytes, bytes(each.stored_bytes)],
    ]]), "No tenant has called.");
  }
}

// ---- the connection ----------------------------------------------------------------------------------------------

const state = byId("state");
const pause = byId("pause");
let events = null;
let latest = null; // kept while paused
let heardAt = 0;
let updates = 0;

function setState(name, words) {
  if (state.dataset.state === name) return;
  state.dataset.state = name;
  state.textContent = words;
}

function take(figures) {
  latest = figures;
  heardAt = Date.now();
  const isNew = figures.point !== null && addPoint(figures.point);
  if (pause.getAttribute("aria-pressed") === "true") return;
  const isStale = figures.age_s > STALE_S; // by the clock of the server
  setState(isStale ? "stale" : "live", isStale ? "The owner does not poll" : "Live");
  show(figures);
  if ((isNew || look.max === "0") && points.length) showHistory();
  updates += 1;
  document.documentElement.dataset.updates = updates;
}

function connect() {
  events = new EventSource("events");
  events.addEventListener("history", (event) => {
    points = JSON.parse(event.data);
    byId("figures").hidden = false;
    pause.hidden = false;
  });
  events.addEventListener("figures", (event) => take(JSON.parse(event.data)));
  events.addEventListener("error", () => {
    setState("lost", "Connection lost, trying again");
    if (events.readyState === EventSource.CLOSED) {
      events.close();
      setTimeout(begin, 2000);
    }
  });
}

// Asks once before it listens: events do not tell whether the token is valid no more, and make no browser ask for one.
async function begin() {
  try {
    const answer = await fetch("figures.json", { cache: "no-store" });
    if (answer.status === 401) {
      setState("locked", "A token is needed: load the page again");
      byId("figures").hidden = true;
      return;
    }
    if (answer.ok) {
      connect();
      return;
    }
  } catch {
    // the server is away: said below
  }
  setState("lost", "Connection lost, trying again");
  setTimeout(begin, 2000);
}

pause.addEventListener("click", () => {
  const isPaused = pause.getAttribute("aria-pressed") !== "true";
  pause.setAttribute("aria-pressed", String(isPaused));
  if (isPaused) setState("paused", "Paused");
  else if (latest !== null) take(latest);
});

setInterval(() => {
  if (["live", "stale"].includes(state.dataset.state) && Date.now() - heardAt > 1000 * STALE_S) setState("lost", "No figures come");
}, 1000);

for (const part of PARTS) byId("tier-legend").append(made("li", part, WORDS[part] || part));
for (const tier of TIERS) byId("hit-legend").append(made("li", tier, tier));
begin();
