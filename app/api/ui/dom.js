// Elements. Text is only ever added as text nodes, so that no text of the API is read as markup.

import { mayChange } from "./api.js";
import { shortName } from "./format.js";

const PROPERTIES = new Set(["value", "checked", "disabled", "hidden", "selected"]);

/** Characters that are not shown, or change how others are: control characters, and marks of direction and of format. */
const INVISIBLE = /[\p{Cc}\p{Cf}\p{Cs}\u2028\u2029]/gu;

/** Return a text in which invisible characters can be seen: names come from clients. */
export const visible = (text) => text.replace(INVISIBLE, "\ufffd");

/** Return an element. Attributes named `on...` are listeners; null, undefined and false ones are left out. */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false)
    .map((child) => (typeof child === "string" ? visible(child) : child)));
  return element;
}

/** Return a button that opens a change, or null where the token does not allow it. */
export const changeButton = (attributes, ...children) => (mayChange() ? h("button", { type: "button", ...attributes }, ...children) : null);

/** Return the columns of a table without that of `changeButton`s where there are none. */
export const withChanges = (columns, column) => (mayChange() ? [...columns, column] : columns);

/** Return a section with a heading. */
export function card(title, ...children) {
  return h("section", { class: "card" }, h("h2", {}, title), ...children);
}

/**
 * Return a table; on a narrow screen each row becomes a list of named values.
 * Columns: {name, cell(row), number, keep}; `keep` breaks no words, and "–" stands for no value, which that list leaves out.
 * Roles are set, since some browsers drop them with `display: block`.
 */
export function table(caption, columns, rows, empty = "Nothing to show.") {
  if (!rows.length) return h("p", { class: "empty" }, empty);
  const head = columns.map((column) =>
    h("th", { role: "columnheader", scope: "col", class: column.number ? "number" : null }, column.name));
  return h("table", { role: "table", class: "rows" },
    h("caption", { class: "hidden" }, caption),
    h("thead", { role: "rowgroup" }, h("tr", { role: "row" }, head)),
    h("tbody", { role: "rowgroup" }, rows.map((row) => tableRow(columns, row))));
}

/** Return one row of a table with these columns. */
export function tableRow(columns, row) {
  return h("tr", { role: "row" }, columns.map((column) => {
    const shown = column.cell(row);
    const kind = column.number ? "number" : column.keep ? "keep" : "";
    return h("td", { role: "cell", "data-label": column.name, class: shown === "–" ? `${kind} none` : kind }, h("div", {}, shown));
  }));
}

/** Return a link to the page of a request, "–" for no request. */
export const requestLink = (id) => (id ? h("a", { href: `#/requests/${encodeURIComponent(id)}`, title: shortName(id) === id ? null : id }, shortName(id)) : "–");

/** Return a list of names and values; with `flow` side by side. */
export function facts(pairs, flow = false) {
  return h("dl", { class: flow ? "facts flow" : "facts" }, pairs.filter(Boolean).map(([name, value]) =>
    h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** Return a description of the API, in which backquotes mark code. */
export const prose = (text) => text.split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));

/** Return a bar of parts, each [class, value, name], with the same as text for screen readers. */
export function shareBar(parts) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0) || 1;
  const label = parts.map(([, value, name]) => `${name} ${Math.round((100 * value) / total)} %`).join(", ");
  return h("div", { class: "bar", role: "img", "aria-label": label }, parts.map(([kind, value]) => {
    const part = h("span", { class: kind });
    part.style.width = `${(100 * value) / total}%`;
    return part;
  }));
}

/** Return a line of values between 0 and 1, of which null ones are gaps, with the same as text for screen readers. */
export function sparkline(values, label, format) {
  const known = values.filter((value) => value !== null);
  if (known.length < 2) return null;
  const make = (tag, attributes) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const text = `${label}: from ${format(known[0])} to ${format(known.at(-1))}, between ${format(Math.min(...known))} and ${format(Math.max(...known))}`;
  const width = values.length - 1;
  const drawn = make("svg", { class: "sparkline", viewBox: `0 -0.1 ${width} 1.2`, preserveAspectRatio: "none", role: "img", "aria-label": visible(text) });
  const path = values.map((value, at) => (value === null ? "" : `${at === 0 || values[at - 1] === null ? "M" : "L"}${at} ${1 - value}`)).join("");
  drawn.append(make("path", { d: path, "vector-effect": "non-scaling-stroke" }));
  return drawn;
}

/** Whether tables show a row as a list of named values, as on phones. */
export const isNarrow = () => matchMedia("(max-width: 52rem)").matches;

/** Return how many rows a list begins with. */
export const firstRows = () => (isNarrow() ? 10 : 50);

/** Return a list that loads page by page: `load(cursor)` returns {items, next_cursor}. */
export function pagedTable(caption, columns, load, empty) {
  const holder = h("div", {});
  let body = null;
  const more = h("button", { type: "button", hidden: true }, "Load more");
  const status = h("p", { class: "hint", role: "status" });
  let num = 0;
  async function next(cursor) {
    more.disabled = true;
    try {
      const page = await load(cursor);
      num += page.items.length;
      if (body === null) {
        const made = table(caption, columns, page.items, empty);
        holder.replaceChildren(made, status, more);
        body = made.querySelector("tbody");
      } else {
        body.append(...page.items.map((item) => tableRow(columns, item)));
      }
      status.textContent = body === null ? "" : `${num} shown${page.next_cursor ? ", there are more" : ""}`;
      more.hidden = !page.next_cursor || body === null;
      more.onclick = () => next(page.next_cursor).catch((error) => { status.textContent = error.message; });
    } finally {
      more.disabled = false;
    }
  }
  return { element: holder, first: next(null) };
}

/** Return a labeled control for a form. */
export function field(label, control, hint) {
  const id = `field-${(field.count = (field.count || 0) + 1)}`;
  control.id = id;
  if (hint) control.setAttribute("aria-describedby", `${id}-hint`);
  return h("div", { class: "field" }, h("label", { for: id }, label), control,
    hint ? h("p", { class: "hint", id: `${id}-hint` }, prose(hint)) : null);
}

/** Return a select of [value, text] pairs. */
export function select(name, options, value) {
  return h("select", { name }, options.map(([each, text]) => h("option", { value: each, selected: each === value }, text)));
}

/** Announce the result of an action, on screen and to screen readers. */
export function announce(text) {
  const target = document.getElementById("announcement");
  target.textContent = visible(text);
  target.hidden = false;
  clearTimeout(announce.timer);
  announce.timer = setTimeout(() => { target.hidden = true; }, 8000);
}

/** Call `run` every `seconds` until `signal` is aborted, one call at a time. */
export function every(seconds, signal, run) {
  let timer = 0;
  const again = () => {
    timer = setTimeout(async () => {
      // The state of the connection is shown at the top; a page keeps what it has.
      await Promise.resolve(run()).catch(() => {});
      if (!signal.aborted) again();
    }, seconds * 1000);
  };
  again();
  signal.addEventListener("abort", () => clearTimeout(timer));
}
