// Numbers with their units, which no line parts from them. What is no number is "–".

const NONE = "–";
const SPACE = "\u00a0";

function digits(value) {
  return value.toFixed(value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

function scaled(value, units, step) {
  let at = 0;
  while (Math.abs(value) >= step * 0.9995 && at < units.length - 1) {
    value /= step;
    at += 1;
  }
  return `${at || !Number.isInteger(value) ? digits(value) : value}${SPACE}${units[at]}`.trimEnd();
}

const finite = (format) => (value) => (Number.isFinite(value) ? format(value) : NONE);

export const bytes = finite((value) => scaled(value, ["B", "KiB", "MiB", "GiB", "TiB", "PiB"], 1024));
export const count = finite((value) =>
  Number.isInteger(value) && value < 10000 ? value.toLocaleString("en") : scaled(value, ["", "k", "M", "G", "T"], 1000));
export const percent = finite((value) => `${(100 * value).toFixed(1)}${SPACE}%`);

export const seconds = finite((value) => {
  if (value === 0) return `0${SPACE}s`;
  if (value < 1) return value < 0.0009995 ? `${digits(value * 1e6)}${SPACE}µs` : `${digits(value * 1e3)}${SPACE}ms`;
  if (value < 120) return `${value < 10 ? value.toFixed(1) : value.toFixed(0)}${SPACE}s`;
  if (value < 7200) return `${(value / 60).toFixed(0)}${SPACE}min`;
  return value < 172800 ? `${(value / 3600).toFixed(0)}${SPACE}h` : `${(value / 86400).toFixed(0)}${SPACE}d`;
});

/** A time of day, of seconds since 1970. */
export function clock(time, exact = true) {
  const options = { hour: "2-digit", minute: "2-digit", ...(exact && { second: "2-digit" }) };
  return new Date(time * 1000).toLocaleTimeString("en-GB", options);
}

/** "1 engine", "2 engines". */
export function counted(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

/** The value that a fraction of a histogram of octaves does not exceed; NaN without values. */
export function quantile(histogram, fraction) {
  const total = (histogram?.counts ?? []).reduce((sum, number) => sum + number, 0);
  let seen = 0;
  for (const [octave, number] of (histogram?.counts ?? []).entries()) {
    if (number && seen + number >= fraction * total) {
      return histogram.first * 2 ** (octave + (fraction * total - seen) / number);
    }
    seen += number;
  }
  return NaN;
}
