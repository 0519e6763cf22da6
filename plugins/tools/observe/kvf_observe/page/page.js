// The page: asks `kvframework observe` each two seconds while it is seen, and draws what came.

import { pointer } from "./charts.js";
import { fill, h } from "./dom.js";
import { PANELS, named } from "./panels.js";
import { Points, RANGES } from "./points.js";
import { clock, counted, percent } from "./units.js";

const EVERY_MS = 2000;
const PATIENCE_MS = 10000;
// Answers without a new point, after which the clock of the points counts as set back.
const STALE = 30;

const place = (id) => document.getElementById(id);
const { documentation } = document.body.dataset;
const rows = new Map(Object.entries(JSON.parse(document.body.dataset.rows)));
const points = new Points();
let status = null;
let range = RANGES.quarter;
let away = "";
let silentSince = null;
let stale = 0;
let timer = 0;
let asking = false;

async function answer(path) {
  return fetch(path, { signal: AbortSignal.timeout(PATIENCE_MS), cache: "no-store" });
}

/** Take the present status and the new points; say why the server is away, "" if it is not. */
async function ask() {
  const history = await answer(`history.json?after=${points.last?.time ?? 0}`);
  if (!history.ok) throw new Error(`HTTP ${history.status} ${history.statusText}`);
  const before = points.last;
  points.take(await history.json());
  const reply = await answer("status");
  if (reply.status === 503) return (await reply.json()).error;
  if (!reply.ok) throw new Error(`HTTP ${reply.status} ${reply.statusText}`);
  status = await reply.json();
  stale = points.last === before ? stale + 1 : 0;
  if (stale > STALE) points.forget();
  return "";
}

async function refresh() {
  clearTimeout(timer);
  if (document.hidden || asking) return;
  asking = true;
  try {
    const why = await ask();
    silentSince = null;
    const since = points.last ? clock(points.last.time) : "before this page was opened";
    away = why && `The server does not answer since ${since}: ${why}`;
  } catch (error) {
    silentSince ??= Date.now() / 1000;
    away = `kvframework observe does not answer since ${clock(silentSince)}: ${error.message}`;
  }
  asking = false;
  draw();
  timer = setTimeout(refresh, EVERY_MS);
}

/** The link to what to do about a problem. */
function linked(where) {
  const row = rows.get(where) ?? rows.get(where.split(".")[0]) ?? "what-do-you-see";
  return documentation ? h("a", { href: `${documentation}/operations.md#${row}` }, "what to do") : null;
}

function draw() {
  document.body.classList.toggle("away", Boolean(away));
  fill(place("notice"), away ? h("p", { class: "notice" }, away) : "");
  fill(place("ranges"), Object.entries(RANGES).map(([name, { name: text }]) =>
    h("button", { type: "button", value: name, "aria-pressed": String(RANGES[name] === range) }, text)));
  if (!status) return;
  const minute = points.within(60);
  document.title = `${away ? "away" : percent(minute.rate())} · kvframework`;
  fill(place("server"), named(status));
  const now = { status, points, minute, linked, stretches: points.stretches(range) };
  // Read aloud when the number changes; the facts change each second.
  fill(place("said"), counted((status.problems ?? []).length, "problem"));
  for (const [id, panel] of Object.entries(PANELS)) show(place(id), panel, now);
}

function show(where, panel, now) {
  const section = where.closest("section");
  const hidden = section.hidden;
  section.hidden = false; // a place has its width only while it is seen
  try {
    const made = panel(now, where);
    section.hidden = made === null;
    fill(where, made ?? "");
  } catch (error) {
    section.hidden = hidden;
    fill(where, h("p", {}, `This panel cannot be drawn: ${error.message}`));
  }
}

function pointAt(event) {
  const drawing = event.target.closest?.(".drawing[data-from]");
  const before = pointer.time;
  pointer.time = null;
  if (drawing) {
    const { from, step, of } = drawing.dataset;
    const box = drawing.getBoundingClientRect();
    const at = Math.floor(((event.clientX - box.left) / box.width) * of);
    pointer.time = Number(from) + (at + 0.5) * Number(step);
  }
  if (pointer.time !== before) draw();
}

place("guide").href = `${documentation}/observe.md`;
place("guide").hidden = !documentation;
place("ranges").addEventListener("click", ({ target }) => {
  range = RANGES[target.value] ?? range;
  draw();
});
document.addEventListener("pointermove", pointAt);
document.addEventListener("pointerleave", pointAt);
document.addEventListener("visibilitychange", refresh);
window.addEventListener("resize", draw);
refresh();
