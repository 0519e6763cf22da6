// Charts in SVG. Each is drawn for the width that it has, and has a table with its numbers behind it.

import { behind, h } from "./dom.js";
import { clock } from "./units.js";

const TOP = 15; // above it, the number of the upper line
const HEIGHT = 150;
const BASE = TOP + HEIGHT;
const AXIS = 18;
const LABEL = 56; // the width of one below a bar
const MOST_ROWS = 30;

// The time under the pointer, in all charts over time at once.
export const pointer = { time: null };

/** A stack of series over stretches of time. A series is {name, look, of(stretch)}; `most` is the top of the axis, 0 for
 * that of the values; `show` makes a value's text. */
export function overTime(place, title, stretches, series, show, most = 0) {
  const width = widthOf(place);
  const stacked = stretches.map((stretch) => series.map(({ of }) => of(stretch)));
  const sum = (values) => values.reduce((total, value) => total + (Number.isFinite(value) ? value : 0), 0);
  const top = most || Math.max(...stacked.map(sum)) * 1.1 || 1;
  const x = (at) => (at * width) / stretches.length;
  const y = (value) => BASE - (HEIGHT * Math.min(value, top)) / top;
  const shapes = series.map(({ look }, nth) => {
    const parts = stacked.map((values, at) => {
      if (!(values[nth] > 0)) return "";
      const low = sum(values.slice(0, nth));
      return `M${px(x(at))} ${px(y(low))}V${px(y(low + values[nth]))}H${px(x(at + 1))}V${px(y(low))}Z`;
    });
    return h("path", { class: look, d: parts.join("") });
  });
  const marks = stretches.map((stretch, at) =>
    stretch.restarts ? h("line", { class: "restart", x1: px(x(at)), x2: px(x(at)), y1: TOP, y2: BASE }) : null);
  const step = stretches[1].time - stretches[0].time;
  const under = pointer.time === null ? -1 : Math.floor((pointer.time - stretches[0].time) / step);
  const at = stretches[under] ? under : stretches.findLastIndex((_, nth) => stacked[nth].some(Number.isFinite));
  const line = stretches[under]
    ? h("rect", { class: "pointed", x: px(x(under)), y: TOP, width: px(width / stretches.length), height: HEIGHT })
    : null;
  const rows = stretches.map((stretch, nth) => [stretch, stacked[nth]]).filter(([, values]) => values.some(Number.isFinite));
  const columns = ["from", ...series.map(({ name }) => name)];
  const restarts = stretches.some((stretch) => stretch.restarts) ? "; a dashed line is a restart of the server" : "";
  const said = `${title}, ${clock(stretches[0].time, false)} to now${restarts}`;
  return [
    h("div", { class: "drawing", "data-from": stretches[0].time, "data-step": step, "data-of": stretches.length },
      drawing(said, width, shapes, grid(width, top, show), marks, line, times(width, stretches, step))),
    legend(series, at < 0 ? [] : stacked[at], show, at < 0 ? "no values yet" : `from ${clock(stretches[at].time)}`),
    behind(`${title}, newest first`, columns,
      rows.slice(-MOST_ROWS).reverse().map(([stretch, values]) => [clock(stretch.time), ...values.map(show)])),
  ];
}

/** Bars side by side: [label, number] each. */
export function bars(place, title, columns, values, show) {
  const width = widthOf(place);
  const top = Math.max(...values.map(([, value]) => value)) || 1;
  const each = width / values.length;
  const every = Math.ceil(LABEL / each);
  const shapes = values.map(([, value], at) => h("rect", {
    class: "used", x: px(at * each + 1), width: px(Math.max(each - 2, 1)),
    y: px(BASE - (value / top) * HEIGHT), height: px((value / top) * HEIGHT),
  }));
  const labels = values.map(([label], at) =>
    at % every === 0 && at * each + LABEL <= width
      ? h("text", { x: px(at * each + 1), y: BASE + 14 }, label) : null);
  return [
    h("div", { class: "drawing" }, drawing(title, width, shapes, labels)),
    behind(title, columns, values.map(([label, value]) => [label, show(value)])),
  ];
}

/** A line through points {x, y} in the order of x, y in [0, 1]; the first one is marked. */
export function curve(place, title, columns, points, showX, showY) {
  const width = widthOf(place);
  const [first, last] = [points[0].x, points.at(-1).x];
  const x = (value) => 6 + ((value - first) / (last - first || 1)) * (width - 12);
  const y = (value) => BASE - value * HEIGHT;
  const path = points.map((point, at) => `${at ? "L" : "M"}${px(x(point.x))} ${px(y(point.y))}`).join("");
  return [
    h("div", { class: "drawing" }, drawing(title, width, grid(width, 1, showY),
      h("path", { class: "line", d: path }),
      h("circle", { class: "dot", cx: px(x(first)), cy: px(y(points[0].y)), r: 5 }),
      h("text", { x: 0, y: BASE + 14 }, `now: ${showX(first)}`),
      h("text", { x: width, y: BASE + 14, "text-anchor": "end" }, showX(last)))),
    behind(title, columns, points.map((point) => [showX(point.x), showY(point.y)])),
  ];
}

/** Parts of a whole in one bar: {name, look, value}. */
export function share(title, parts, show) {
  const whole = parts.reduce((sum, { value }) => sum + value, 0) || 1;
  let from = 0;
  const shapes = parts.map(({ look, value }) => {
    const made = h("rect", { class: look, x: px((from / whole) * 1000), y: 0, width: px((value / whole) * 1000), height: 10 });
    from += value;
    return made;
  });
  return [
    h("svg", { class: "share", viewBox: "0 0 1000 10", preserveAspectRatio: "none", role: "img", "aria-label": title }, shapes),
    legend(parts, parts.map(({ value }) => value), show, ""),
  ];
}

/** A small picture of one tier: how long reads took, and where it was down. */
export function strip(title, values) {
  const top = Math.max(...values.map(({ value }) => value || 0)) || 1;
  const bar = (look, keep, height) => h("path", {
    class: look,
    d: values.map((each, at) => (keep(each) ? `M${at} 20V${px(20 - height(each))}H${at + 1}V20Z` : "")).join(""),
  });
  return h("svg", { class: "strip", viewBox: `0 0 ${values.length} 20`, preserveAspectRatio: "none", role: "img", "aria-label": title },
    bar("bad", ({ down }) => down, () => 20),
    bar("l2", ({ down, value }) => !down && value > 0, ({ value }) => 1 + (19 * value) / top),
    bar("idle", ({ known, down, value }) => known && !down && !(value > 0), () => 1));
}

function drawing(said, width, ...shapes) {
  const height = BASE + AXIS;
  return h("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": said }, shapes);
}

function grid(width, top, show) {
  return [0.5, 1].map((part) => {
    const y = BASE - part * HEIGHT;
    return [h("line", { class: "grid", x1: 0, x2: width, y1: px(y), y2: px(y) }),
      part === 1 ? h("text", { x: 0, y: px(y - 4) }, show(top)) : null];
  });
}

function times(width, stretches, step) {
  const middle = Math.floor(stretches.length / 2);
  const end = stretches.at(-1).time + step;
  return [h("line", { class: "base", x1: 0, x2: width, y1: BASE, y2: BASE }),
    h("text", { x: 0, y: BASE + 14 }, clock(stretches[0].time, false)),
    h("text", { x: px(width / 2), y: BASE + 14, "text-anchor": "middle" }, clock(stretches[middle].time, false)),
    h("text", { x: width, y: BASE + 14, "text-anchor": "end" }, clock(end, false))];
}

function legend(series, values, show, when) {
  const items = series.map(({ name, look }, at) =>
    h("li", {}, h("svg", { class: "key", viewBox: "0 0 10 10", "aria-hidden": "true" }, h("rect", { class: look, width: 10, height: 10 })),
      h("span", {}, name), h("strong", {}, values.length ? show(values[at]) : "–")));
  return h("ul", { class: "legend" }, items, when ? h("li", { class: "when" }, when) : null);
}

function widthOf(place) {
  return Math.max(Math.floor(place.clientWidth), 200);
}

function px(value) {
  return Math.round(value * 10) / 10;
}
