// Numbers, sizes, times and names as text.

const whole = new Intl.NumberFormat("en");
const compactNumber = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];

export const count = (value) => (value === null || value === undefined ? "–" : whole.format(value));
export const compact = (value) => compactNumber.format(value);
export const name = (text) => text.replaceAll("_", " ");
export const shortHash = (hash) => (hash.length > 14 ? `${hash.slice(0, 12)}…` : hash);

/** Return a number and its unit, between which no line breaks. */
const measured = (number, unit) => `${number}\u00a0${unit}`;

/** Return a number with at most one decimal. */
const short = (value) => value.toFixed(1).replace(/\.0$/, "");

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return measured(value >= 100 ? value.toFixed(0) : short(value), UNITS[unit]);
}

/** Return a size as settings have it: in the largest unit that divides it, such as 128MiB. */
export function exactSize(bytes) {
  let value = bytes;
  let unit = 0;
  while (value && value % 1024 === 0 && unit < UNITS.length - 1) { value /= 1024; unit += 1; }
  return unit ? `${value}${UNITS[unit]}` : String(bytes);
}

/** Return a share of a total in percent, without a total as a dash. */
export function percent(part, total) {
  if (!total) return "–";
  const value = (100 * part) / total;
  return measured(value > 0 && value < 10 ? value.toFixed(1) : value.toFixed(0), "%");
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1) return measured(Math.round(value * 1000), "ms");
  if (value < 10) return measured(short(value), "s");
  if (value < 120) return measured(Math.round(value), "s");
  if (value < 7200) return measured(Math.round(value / 60), "min");
  return value < 172800 ? measured(Math.round(value / 3600), "h") : measured(Math.round(value / 86400), "days");
}

/** Return a duration in words, as in a sentence. */
export function duration(value) {
  const [number, unit] = value < 120 ? [Math.round(value), "second"] : [Math.round(value / 60), "minute"];
  return measured(number, number === 1 ? unit : `${unit}s`);
}

/** Return seconds that were spent or saved, which stay seconds however many they are. */
export const spent = (value) => (Math.abs(value) > 0 && Math.abs(value) < 1
  ? measured((value * 1000).toFixed(value < 0.01 ? 1 : 0), "ms")
  : measured(new Intl.NumberFormat("en", { maximumFractionDigits: 1 }).format(value), "s"));

const pad = (number) => String(number).padStart(2, "0");

/** Return the local time of day of a Unix time. */
export function clock(unixS, withSeconds = false) {
  const date = new Date(unixS * 1000);
  return `${pad(date.getHours())}:${pad(date.getMinutes())}${withSeconds ? `:${pad(date.getSeconds())}` : ""}`;
}

const dayOf = (date) => `${date.getFullYear()}-${pad(date.getMonth() + 1)}-${pad(date.getDate())}`;

/** Return the local date and time of an RFC 3339 text. */
export const dated = (text) => `${dayOf(new Date(text))} ${clock(Date.parse(text) / 1000, true)}`;

/** Return the local time of an RFC 3339 text, with the date if that is not today, or a dash. */
export function moment(text) {
  if (!text) return "–";
  return dayOf(new Date(text)) === dayOf(new Date()) ? clock(Date.parse(text) / 1000, true) : dated(text);
}

/** What the pool's memory is, by its kind; `pinned` is the word for blocks that are not evicted. only a GPU's is locked. */
export const memory = ({ pool: { kind }, engine: { device } }) =>
  ({ pinned: ["cpu", "none"].includes(device) ? "pageable memory" : "page-locked memory", shm: "shared memory", file: "a file" })[kind] ?? kind;

const NAME_CHARS = 40;

/** Return a name without its middle, if it is long: clients give requests names of up to 512 characters. */
export function shortName(text) {
  const chars = [...text];
  return chars.length <= NAME_CHARS ? text : `${chars.slice(0, 28).join("")}…${chars.slice(-11).join("")}`;
}

/** Return any JSON value as a short text. */
export function value(given) {
  if (given === null || given === undefined) return "none";
  if (typeof given === "boolean") return given ? "true" : "false";
  if (typeof given === "number") return String(given);
  if (Array.isArray(given) && given.every((each) => typeof each === "string")) return given.join(", ") || "none";
  return typeof given === "object" ? JSON.stringify(given) : String(given);
}
