// The panels: what each shows of the status document and of the history. One that has nothing to show gives null.

import { bars, curve, overTime, share, strip } from "./charts.js";
import { h, table } from "./dom.js";
import { bytes, count, counted, percent, quantile, seconds } from "./units.js";

const MOST_ROWS = 12;
const FOUND = [
  { name: "L1", look: "l1" },
  { name: "L2", look: "l2" },
];
const MISSED = { name: "missed", look: "missed" };
const STATES = [
  { name: "used", look: "used" },
  { name: "quarantined", look: "quarantined" },
  { name: "free", look: "free" },
];

/** By the id of its place. Each gets {status, points, stretches, minute, linked} and its place. */
export const PANELS = {
  problems({ status, linked }) {
    const problems = status.problems ?? [];
    if (!problems.length) return null;
    const items = problems.slice(0, 2 * MOST_ROWS).map(({ where, fact }) =>
      h("li", {}, h("b", {}, where), " ", fact, " ", linked(where)));
    return [h("h2", {}, counted(problems.length, "problem")), h("ul", {}, items)];
  },

  tiles({ status, minute }) {
    const { lookups = {}, l1 = {} } = status;
    const found = lookups.hit_tokens ?? NaN;
    const used = (l1.used_bytes - (l1.quarantined_bytes ?? 0)) / l1.capacity_bytes;
    const tile = (name, value, more) => h("div", {}, h("span", {}, name), h("strong", {}, value), h("small", {}, more));
    return [
      tile("Hit rate", percent(minute.rate()), `last minute; ${percent(found / lookups.asked_tokens)} since the start`),
      tile("Tokens saved", `${count(minute.per("l1_tokens") + minute.per("l2_tokens"))}/s`, `last minute; ${count(found)} since the start`),
      tile("Prefill saved", seconds(lookups.last_hour?.prefill_saved_s), `last hour; ${seconds(lookups.prefill_saved_s)} since the start`),
      tile("Lookups", `${count(minute.per("lookups"))}/s`, `last minute; ${count(lookups.lookups)} since the start`),
      tile("L1 used", percent(used), `of ${bytes(l1.capacity_bytes)}, ${counted(l1.objects, "object")}`),
      tile("Evictions", `${count(minute.per("evicted_objects"))}/s`, `last minute; ${count(l1.evictions)} since the start`),
      tile("Instances", count((status.instances ?? []).length), counted((status.messaging?.sessions ?? []).length, "connected client")),
    ];
  },

  "hit-rate"({ stretches }, place) {
    const series = FOUND.map((each) => ({ ...each, of: (stretch) => stretch.rate(each.look) }));
    return overTime(place, "Hit rate by tier", stretches, series, percent, 1);
  },

  tokens({ stretches }, place) {
    const rate = (name) => (stretch) => stretch.per(name);
    const missed = (stretch) => stretch.per("asked_tokens") - stretch.per("l1_tokens") - stretch.per("l2_tokens");
    const series = [...FOUND.map((each) => ({ ...each, of: rate(`${each.look}_tokens`) })), { ...MISSED, of: missed }];
    return overTime(place, "Lookup tokens per second", stretches, series, (value) => `${count(value)}/s`);
  },

  l1({ status, stretches }, place) {
    const { l1 = {} } = status;
    const series = STATES.slice(0, 2).map((each) => ({ ...each, of: (stretch) => stretch[`${each.name}_bytes`] }));
    const now = { used: l1.used_bytes - (l1.quarantined_bytes ?? 0), quarantined: l1.quarantined_bytes, free: l1.free_bytes };
    const parts = STATES.map((each) => ({ ...each, value: now[each.name] ?? 0 }));
    return [
      h("h3", {}, `now, of ${bytes(l1.capacity_bytes)}`),
      share(`L1 now: ${parts.map(({ name, value }) => `${name} ${bytes(value)}`).join(", ")}`, parts, bytes),
      h("h3", {}, "over time"),
      overTime(place, "Bytes of L1 by state", stretches, series, bytes, l1.capacity_bytes),
    ];
  },

  evictions({ status, stretches }, place) {
    const evicted = status.l1?.evicted;
    const words = { room: "to make room", watermark: "by the high watermark", tenant: "by a tenant's share", hinted: "by request hint" };
    const series = [{ name: "objects", look: "l2", of: (stretch) => stretch.per("evicted_objects") }];
    const causes = Object.entries(evicted ?? {}).map(([cause, number]) => `${count(number)} ${Object.hasOwn(words, cause) ? words[cause] : cause}`);
    return [
      causes.length ? h("p", {}, `Since the start: ${causes.join(", ")}.`) : null,
      overTime(place, "Objects evicted per second", stretches, series, (value) => `${count(value)}/s`),
    ];
  },

  capacity({ status }, place) {
    const points = (status.l1?.more_capacity ?? []).map(({ capacity_bytes, hit_rate }) => ({ x: capacity_bytes, y: hit_rate }));
    if (points.length < 2 || !status.lookups?.asked_tokens) return null;
    const [now, most] = [points[0], points.at(-1)];
    const gain = most.y - now.y;
    // The least capacity that gives most of what any gives.
    const best = points.find(({ y }) => y - now.y >= 0.8 * gain);
    const said = gain < 0.005
      ? `${bytes(most.x)} would have given almost no more hits.`
      : [h("strong", {}, `+${bytes(best.x - now.x)} would have raised the hit rate by ${percent(best.y - now.y)}`),
        `: to ${percent(best.y)} from ${percent(now.y)} in L1, since the start.`];
    return [h("p", { class: "said" }, said), curve(place, "Hit rate of L1 by its capacity", ["capacity", "hit rate"], points, bytes, percent)];
  },

  ages({ status }, place) {
    const idle = status.l1?.evicted_idle_s;
    const wanted = status.l1?.wanted_after_eviction_s;
    const counts = idle?.counts ?? [];
    const [from, to] = [counts.findIndex(Boolean), counts.findLastIndex(Boolean)];
    if (from < 0) return null;
    const values = counts.slice(from, to + 1).map((number, at) => [`< ${seconds(idle.first * 2 ** (from + at + 1))}`, number]);
    const again = (wanted?.counts ?? []).reduce((sum, number) => sum + number, 0);
    return [
      h("p", {}, `Half of the evicted objects were idle for less than ${seconds(quantile(idle, 0.5))}, nine in ten for less than ${seconds(quantile(idle, 0.9))}.`,
        again ? ` ${count(again)} were requested again, half of these within ${seconds(quantile(wanted, 0.5))}.` : ""),
      bars(place, "Evicted objects by the time since their last use", ["idle", "objects"], values, count),
    ];
  },

  misses({ status }) {
    const misses = Object.entries(status.lookups?.misses ?? {}).filter(([, number]) => number > 0);
    if (!misses.length) return null;
    const all = misses.reduce((sum, [, number]) => sum + number, 0);
    misses.sort(([, one], [, other]) => other - one);
    return table("Lookups that missed, by reason", ["reason", "lookups", "of all misses"],
      misses.slice(0, 2 * MOST_ROWS).map(([reason, number]) => [reason.replaceAll("_", " "), count(number), [percent(number / all), meter(number / all)]]));
  },

  tiers({ status, stretches, minute }) {
    const tiers = status.l2 ?? [];
    if (!tiers.length) return null;
    const rows = tiers.map((tier, at) => {
      const rates = minute.tiers[at] ?? {};
      const rate = (name) => bytes(minute.seconds ? (rates[name] ?? 0) / minute.seconds : NaN);
      const drawn = stretches.map(({ last, tiers: sums }) => ({
        known: Boolean(last), down: sums[at]?.down > 0, value: sums[at]?.gets ? sums[at].get_seconds / sums[at].gets : 0,
      }));
      return [
        tier.name,
        [circuit(tier), strip(`${tier.name}: mean time of reads, and times when the tier was down`, drawn)],
        latency(tier, "get_into"),
        latency(tier, "put"),
        `${rate("read_bytes")}/s`,
        `${rate("written_bytes")}/s`,
        percent(tier.hits / (tier.hits + tier.misses)),
        tier.usage ? [`${bytes(tier.usage.used_bytes)} of ${bytes(tier.usage.capacity_bytes)}`] : "–",
        count(tier.write_pending),
      ];
    });
    return table("Tiers", ["tier", "circuit", "read p50, p99", "write p50, p99", "read", "written", "hit rate", "used", "objects to write"], rows);
  },

  models: (now) => usage(now, "models", "model"),
  tenants: (now) => usage(now, "tenants", "tenant"),
  engines: (now) => usage(now, "engines", "engine"),

  prefixes({ status }) {
    const prefixes = status.use?.hot_prefixes ?? [];
    if (!prefixes.length) return null;
    const rows = prefixes.slice(0, 2 * MOST_ROWS).map(({ prefix, model, count: most, error, hit_tokens: found }) => [
      prefix,
      model,
      error ? `${count(most - error)} to ${count(most)}` : count(most),
      count(found),
      count(Math.round(found / (most - error))),
    ]);
    return [
      h("p", {}, "The first chunks of prompts with the most lookups since the server's start. Their names change at the next start."),
      table("Hot prefixes", ["prefix", "model", "lookups", "tokens found", "tokens per lookup"], rows),
    ];
  },

  instances({ status }) {
    const instances = status.instances ?? [];
    if (!instances.length) return h("p", {}, "No instance is registered.");
    const rows = instances.slice(0, 4 * MOST_ROWS).map((each) => [
      String(each.instance_id),
      each.model,
      `process ${each.pid}${each.world_size > 1 ? `, rank ${each.rank ?? "–"} of ${each.world_size}` : ""}`,
      `${each.transport}${each.is_gpu ? ", GPU" : ""}`,
      bytes(each.bytes_per_token),
      each.lost ? [h("b", { class: "down" }, "lost"), ` ${each.lost}`] : "registered",
    ]);
    return [table("Instances", ["instance", "model", "engine", "transport", "bytes per token", "state"], rows), more(instances, rows)];
  },
};

function usage({ status }, kind, noun) {
  const all = Object.entries(status.use?.[kind] ?? {}).filter(([, row]) => row.bytes || row.lookups || row.stored_objects);
  if (!all.length) return null;
  all.sort(([, one], [, other]) => other.bytes - one.bytes || other.hit_tokens - one.hit_tokens);
  const whole = status.l1?.capacity_bytes;
  const rows = all.slice(0, MOST_ROWS).map(([name, row]) => [
    name,
    [bytes(row.bytes), meter(row.bytes / whole)],
    count(row.objects),
    percent(row.hit_tokens / row.asked_tokens),
    count(row.hit_tokens),
    count(row.asked_tokens),
    count(row.stored_objects),
    count(row.evicted_objects),
  ]);
  return [table(`Use by ${noun}`, [noun, "in L1", "objects", "hit rate", "tokens found", "tokens asked", "stored", "evicted"], rows), more(all, rows)];
}

function circuit(tier) {
  if (tier.state === "closed") return tier.problems?.length ? h("b", { class: "down" }, tier.problems.join("; ")) : h("b", { class: "up" }, "works");
  const which = Object.entries(tier.circuits ?? {}).filter(([, state]) => state !== "closed").map(([name]) => `${name}s`);
  return [h("b", { class: "down" }, `down for ${which.join(" and ") || "calls"}`), `, for ${seconds(tier.state_s)} (${tier.state}): ${tier.last_error}`];
}

function latency(tier, call) {
  const found = tier.latency_ms?.[call];
  return found?.count ? `${seconds(found.p50 / 1000)}, ${seconds(found.p99 / 1000)}` : "–";
}

function meter(part) {
  const width = Math.min(Math.max(part, 0), 1) * 100 || 0;
  return h("svg", { class: "meter", viewBox: "0 0 100 4", preserveAspectRatio: "none", "aria-hidden": "true" },
    h("rect", { class: "free", width: 100, height: 4 }), h("rect", { class: "used", width: width.toFixed(1), height: 4 }));
}

function more(all, rows) {
  return all.length > rows.length ? h("p", {}, `and ${count(all.length - rows.length)} more`) : null;
}

/** The line below the title, and the page's. */
export function named({ server = {} }) {
  const places = [server.endpoint, server.tcp].filter(Boolean).join(", ");
  return `${server.version} at ${places}, up ${seconds(server.uptime_s)}, process ${server.pid}`;
}
