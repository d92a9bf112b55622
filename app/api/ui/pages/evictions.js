// Evictions: which blocks left the pool, when, why, and whether they were requested again.

import { causeTexts, get } from "../api.js";
import { card, facts, field, firstRows, h, pagedTable, requestLink, select, table } from "../dom.js";
import { count, moment, name, percent, seconds, shortHash, size } from "../format.js";

export const title = "Evictions";

const SPANS = { "900": "15 minutes", "3600": "hour", "86400": "day", "604800": "week", "": "all that is kept" };

/** Return the filter of the address as parameters of the API. */
function filterOf(query) {
  const filter = Object.fromEntries(["reason", "request", "tenant", "since", "until"].map((key) => [key, query.get(key) || null]));
  const span = query.get("span") ?? (filter.since ? "" : "86400");
  if (span) filter.since = new Date(Date.now() - Number(span) * 1000).toISOString();
  return { filter, span };
}

export async function show(main, { query, signal }) {
  const { filter, span } = filterOf(query);
  const { evicted: texts, short: { evicted: short } } = await causeTexts(signal);
  const { since, until } = filter;
  const pages = pagedTable("Evicted blocks, newest first", columnsOf(texts, short), (cursor) =>
    get("evictions", { ...filter, limit: firstRows(), cursor }, signal), "No evictions match.");
  const [summary] = await Promise.all([get("evictions/summary", { since, until }, signal), pages.first]);
  main.replaceChildren(h("h1", {}, title), filters(query, filter, span, short),
    h("div", { class: "columns" }, totals(summary), byReason(summary, texts, short), ages(summary)),
    card("Blocks", pages.element));
}

function filters(query, { reason, request, tenant, since, until }, span, short) {
  const text = (key, value) => h("input", { name: key, value: value || "", autocomplete: "off", spellcheck: "false" });
  const explicit = !span && since ? h("p", { class: "notice" }, `From ${moment(since)} to ${until ? moment(until) : "now"}. `,
    h("a", { href: "#/evictions" }, "Show the last day")) : null;
  return h("form", { class: "filters", onsubmit(event) {
    event.preventDefault();
    const wanted = new URLSearchParams(new FormData(event.target));
    if (explicit) {
      wanted.delete("span");
      for (const key of ["since", "until"]) if (query.get(key)) wanted.set(key, query.get(key));
    }
    location.hash = `#/evictions?${wanted}`;
  } },
    explicit ?? field("Time", select("span", Object.entries(SPANS).sort(([one], [other]) => (one || 1e9) - (other || 1e9)), span)),
    field("Reason", select("reason", [["", "all reasons"], ...Object.entries(short)], reason || "")),
    field("Stored by request", text("request", request)),
    field("Tenant's digest", text("tenant", tenant)),
    h("button", {}, "Filter"));
}

function totals({ total, regretted, regret_rate: rate, never_hit: neverHit, resets, reset_blocks: resetBlocks }) {
  return card("Summary", facts([["evicted", count(total)], ["regretted: requested again", `${count(regretted)}, ${percent(rate, 1)}`],
    ["never used", `${count(neverHit)}, ${percent(neverHit, total)}`], ["whole resets", `${count(resets)}, ${count(resetBlocks)} blocks`]]),
  h("p", { class: "hint" }, "Of the time shown, for all reasons and requests. Many regrets: the pool is too small. Many never used: less should be stored."));
}

/** Return a table that stays one on narrow screens. */
function compact(made) {
  made.classList.add("compact");
  return made;
}

function bar(value, highest) {
  const inner = h("span", { class: "host" });
  inner.style.width = `${highest ? (100 * value) / highest : 0}%`;
  return h("div", { class: "with-bar" }, h("div", { class: "bar thin", "aria-hidden": "true" }, inner), h("span", {}, count(value)));
}

function byReason({ by_reason: reasons, regretted_by_reason: regretted }, texts, short) {
  const rows = Object.entries(reasons).sort(([, one], [, other]) => other - one);
  const highest = Math.max(...rows.map(([, number]) => number), 0);
  return card("By reason", compact(table("Evictions by reason", [
    { name: "Reason", cell: ([reason]) => [short[reason] ?? name(reason), h("small", {}, texts[reason])] },
    { name: "Blocks", number: true, cell: ([, number]) => bar(number, highest) },
    { name: "Regretted", number: true, cell: ([reason]) => count(regretted[reason] ?? 0) },
  ], rows, "No evictions in this time.")));
}

function ages({ age, total }) {
  const highest = Math.max(...age.buckets.map((bucket) => bucket.count), 0);
  const labels = age.buckets.map((bucket, index) => bucket.upto_s === null ? `over ${seconds(age.buckets[index - 1].upto_s)}` : `up to ${seconds(bucket.upto_s)}`);
  return card("Age at eviction", total ? h("p", { class: "hint" }, `From ${seconds(age.min_s)} to ${seconds(age.max_s)}, on average ${seconds(age.mean_s)}, since the block was stored.`) : null,
    compact(table("Evictions by age", [
      { name: "Age", cell: (index) => labels[index] },
      { name: "Blocks", number: true, cell: (index) => bar(age.buckets[index].count, highest) },
    ], total ? labels.map((_, index) => index) : [], "No evictions in this time.")));
}

function columnsOf(texts, short) {
  return [
    { name: "Time", keep: true, cell: (one) => moment(one.time) },
    { name: "Reason", keep: true, cell: (one) => h("span", { title: texts[one.reason] }, short[one.reason] ?? name(one.reason)) },
    { name: "Stored by", cell: (one) => requestLink(one.request) },
    { name: "Needed by", cell: (one) => requestLink(one.needed_by) },
    { name: "Age", number: true, cell: (one) => seconds(one.age_s) },
    { name: "Idle", number: true, cell: (one) => seconds(one.idle_s) },
    { name: "Hits", number: true, cell: (one) => count(one.hits) },
    { name: "Regretted", keep: true, cell: (one) => moment(one.regretted_at) },
    { name: "Position", number: true, cell: (one) => count(one.position) },
    { name: "Size", number: true, cell: (one) => size(one.size) },
    { name: "Block", keep: true, cell: (one) => h("code", { title: one.hash }, shortHash(one.hash)) },
  ];
}
