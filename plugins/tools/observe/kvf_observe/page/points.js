// The points of /history.json, merged over time, and what happened in each stretch of it.
// Points hold sums since the start of the server; `boot` counts the servers.

const SECONDS = 900;
const MINUTES = 1440;
export const RANGES = {
  quarter: { name: "15 min", span: 900, step: 10, points: (points) => points.seconds },
  day: { name: "24 h", span: 86400, step: 900, points: (points) => points.minutes },
};
const SUMS = ["asked_tokens", "l1_tokens", "l2_tokens", "lookups", "evicted_objects"];
const STATES = ["used_bytes", "free_bytes", "quarantined_bytes"];

export class Points {
  constructor() {
    this.forget();
  }

  forget() {
    this.seconds = [];
    this.minutes = [];
    this.received = 0;
  }

  /** Take an answer. Points are objects from here on. */
  take(answer) {
    const named = (fields, values) => Object.fromEntries(fields.map((field, at) => [field, values[at]]));
    const read = (values) => {
      const point = named(answer.fields, values);
      point.tiers = (point.tiers ?? []).map((tier) => named(answer.tier_fields, tier));
      return point;
    };
    const fresh = answer.seconds.map(read);
    if (fresh.length) this.received = performance.now();
    this.seconds = [...this.seconds, ...fresh].slice(-SECONDS);
    for (const point of answer.minutes.map(read)) {
      const minute = Math.floor(point.time / 60);
      while (this.minutes.length && Math.floor(this.minutes.at(-1).time / 60) >= minute) this.minutes.pop();
      this.minutes.push(point);
    }
    this.minutes = this.minutes.slice(-MINUTES);
  }

  get last() {
    return this.seconds.at(-1);
  }

  /** The time of now by the clock of the points, also while none come. */
  get now() {
    return this.last ? this.last.time + (performance.now() - this.received) / 1000 : Date.now() / 1000;
  }

  /** What happened in the last `span` seconds. */
  within(span) {
    const after = this.now - span;
    const all = new Stretch(after);
    each(this.seconds, (before, point) => point.time > after && all.add(before, point));
    return all;
  }

  /** The stretches of a range, oldest first. One without points has `last` undefined. */
  stretches({ span, step, points }) {
    const end = Math.ceil(this.now / step) * step;
    const made = Array.from({ length: span / step }, (_, at) => new Stretch(end - span + at * step));
    each(points(this), (before, point) => made[Math.floor((point.time - end + span) / step)]?.add(before, point));
    return made;
  }
}

/** A stretch of time that begins at `time`: sums of what happened, and its last point. */
class Stretch {
  constructor(time) {
    this.time = time;
    this.seconds = 0;
    this.restarts = 0;
    this.tiers = [];
    for (const name of SUMS) this[name] = 0;
  }

  add(before, point) {
    this.last = point;
    for (const name of STATES) this[name] = point[name];
    // A lower number of servers: another process counts them, so nothing is known of what happened between.
    if (!before || point.boot < before.boot) return;
    const restarted = point.boot > before.boot || point.lookups < before.lookups;
    this.restarts += restarted;
    this.seconds += point.time - before.time;
    for (const name of SUMS) this[name] += Math.max(point[name] - (restarted ? 0 : before[name]), 0);
    point.tiers.forEach((tier, at) => {
      const was = restarted ? undefined : before.tiers[at];
      const sum = (this.tiers[at] ??= { gets: 0, get_seconds: 0, read_bytes: 0, written_bytes: 0, down: 0 });
      for (const name of ["gets", "get_seconds", "read_bytes", "written_bytes"]) {
        sum[name] += Math.max(tier[name] - (was?.[name] ?? 0), 0);
      }
      sum.down += !tier.up;
    });
  }

  /** The share of the tokens that were found: where, or anywhere. */
  rate(where) {
    if (!this.asked_tokens) return NaN;
    const found = where ? this[`${where}_tokens`] : this.l1_tokens + this.l2_tokens;
    return found / this.asked_tokens;
  }

  /** A sum for each second. */
  per(name) {
    return this.seconds ? this[name] / this.seconds : NaN;
  }
}

function each(points, heard) {
  points.forEach((point, at) => heard(points[at - 1], point));
}
