// What if: what pools of other sizes, eviction policies and store modes would have found, and what `auto` made of it.

import { get } from "../api.js";
import { Chart } from "../chart.js";
import { card, every, facts, h, table } from "../dom.js";
import { compact, count, moment, size, spent } from "../format.js";

export const title = "What if";

const REFRESH_S = 10;
const COLORS = { lru: "device", arc: "host", hazard: "tier" };
/** Return a share with a decimal, since a point is a lot. */
const percent = (share) => `${(100 * share).toFixed(1)} %`;
/** What curves are in: the field of a point, and how it is shown. */
const UNITS = {
  share: { text: "Share of prompt tokens", of: (point) => point.hit_rate, format: (value) => percent(value) },
  tokens: { text: "Prompt tokens an hour", of: (point) => point.hit_tokens_per_hour, format: compact },
  seconds: { text: "Prefill saved an hour", of: (point) => point.prefill_seconds_per_hour, format: spent },
};
const link = (setting, text = setting) => h("a", { href: `#/config?setting=${setting}` }, text);
const nameOf = (one) => `${one.eviction_policy}, ${one.store_mode}`;
const isSame = (one, other) => nameOf(one) === nameOf(other);
const bar = ({ low, high }) => `${percent(low)} to ${percent(high)}`;

export async function show(main, { query, signal }) {
  const unit = Object.hasOwn(UNITS, query.get("unit")) ? query.get("unit") : "share";
  const parts = { state: h("div", {}), auto: h("div", {}), list: h("div", {}) };
  const chart = { element: h("div", {}), drawn: null, names: "" };
  const load = async () => {
    const answer = await get("what-if", {}, signal);
    parts.state.replaceChildren(...stateOf(answer));
    parts.auto.replaceChildren(autoCard(answer));
    parts.list.replaceChildren(...(answer.curves.length ? [atThisSize(answer), bias(answer)] : []));
    draw(chart, answer, unit, signal);
  };
  await load();
  main.replaceChildren(h("h1", {}, title),
    h("p", { class: "hint" }, "Simulated with the keys of the requests that end: which share of their prompt tokens the device and pools of other sizes, eviction policies and store modes would have served."),
    parts.state, chart.element, parts.list, parts.auto);
  every(REFRESH_S, signal, async () => {
    // What is being read or used stays.
    const isUsed = [...Object.values(parts), chart.element].some((part) => part.contains(document.activeElement) || part.matches(":hover"));
    if (!isUsed && !document.hidden) await load();
  });
}

function stateOf(answer) {
  const { curves, current, next_gib: nextGib, enabled } = answer;
  if (!enabled) {
    return [h("p", { class: "notice" }, "Nothing is simulated. To begin, set ", link("what_if"), " to true, here or by ",
      h("code", {}, "kvferry config set what_if=true"), "; it takes at most 64 MiB and a small part of one processor.")];
  }
  if (!curves.length) return [h("p", { class: "notice" }, "No request has ended since the simulation began.")];
  const here = curves.find((curve) => isSame(curve, current));
  const now = pointNow(here, current);
  const lost = answer.dropped_requests ? h("p", { class: "notice" }, `${count(answer.dropped_requests)} requests are left out: they came faster than they were simulated.`) : null;
  return [lost, card("Now", facts([
    ["pool", size(current.pool_bytes)], ["policy and mode", nameOf(current)],
    ["measured", percent(current.hit_rate)],
    now ? ["simulated", `${percent(now.hit_rate)} (95% bar: ${bar(now)})`] : null,
    ["the next GiB finds", nextGib.hit_tokens_per_hour === null ? "not measured yet" : `${compact(nextGib.hit_tokens_per_hour)} more tokens an hour`],
    ["and saves", nextGib.prefill_seconds_per_hour === null ? "not measured yet" : `${spent(nextGib.prefill_seconds_per_hour)} of prefill an hour`],
    ["knee", kneeOf(here)],
    ["counted", `${compact(answer.prompt_tokens)} prompt tokens since ${moment(answer.since)}`],
    ["sample", answer.sampled_share === 1 ? "all keys" : `${percent(answer.sampled_share)} of the keys`],
  ], true), h("p", { class: "hint" }, "The knee is the size from which on no next size adds 1% of the prompt tokens or more."))].filter(Boolean);
}

const kneeOf = (curve) => (curve === undefined ? "–" : curve.knee_bytes === null ? "beyond the largest size" : size(curve.knee_bytes));
const pointNow = (curve, current) => curve?.points.find((point) => point.pool_bytes === current.pool_bytes);

/** Draw the curves of an answer; a new chart is made when there are others. */
function draw(chart, { curves, current }, unit, signal) {
  const names = curves.map(nameOf).join();
  const { text, of, format } = UNITS[unit];
  if (!curves.length) return chart.element.replaceChildren();
  if (chart.names !== names) {
    chart.names = names;
    const series = curves.map((curve) => ({ label: nameOf(curve), color: COLORS[curve.eviction_policy] ?? "computed", dash: curve.store_mode === "lazy" ? [] : [6, 4] }));
    chart.drawn = new Chart(text, { series: [...series, { label: "now", color: "ink", isPoint: true }], format,
      note: "over the size of the pool; dashed: eager", along: { name: "Pool", format: size } }, signal);
    chart.element.replaceChildren(h("div", { class: "choice", role: "group", "aria-label": "Unit" }, Object.entries(UNITS).map(([key, one]) =>
      h("a", { href: `#/what-if?unit=${key}`, "aria-current": key === unit ? "true" : null }, one.text))), chart.drawn.element);
  }
  const sizes = curves[0].points.map((point) => point.pool_bytes);
  const here = curves.find((curve) => isSame(curve, current));
  const values = curves.map((curve) => curve.points.map(of));
  // What a share is worth is the same at all sizes.
  const best = curves.flatMap((curve) => curve.points).reduce((one, other) => (other.hit_rate > one.hit_rate ? other : one));
  const worth = best.hit_rate ? (of(best) ?? 0) / best.hit_rate : 0;
  const bars = curves.map((curve) => curve.points.map(({ low, high }) => [low * worth, high * worth]));
  const present = sizes.map((bytes, at) => (here && bytes === current.pool_bytes ? of(here.points[at]) : null));
  return chart.drawn.set(sizes[0] / 1.2, sizes.at(-1) * 1.2, sizes, [...values, present], bars);
}

function atThisSize({ curves, current }) {
  const rows = curves.map((curve) => ({ curve, point: pointNow(curve, current) })).filter(({ point }) => point)
    .sort((one, other) => other.point.hit_rate - one.point.hit_rate);
  return card(`At ${size(current.pool_bytes)}, the present size`, table("Policies and modes at the present size, the best first", [
    { name: "Policy, mode", keep: true, cell: ({ curve }) => [h("b", {}, nameOf(curve)), isSame(curve, current) ? h("small", {}, "now") : null] },
    { name: "Hit rate", number: true, cell: ({ point }) => percent(point.hit_rate) },
    { name: "95% bar", keep: true, cell: ({ point }) => bar(point) },
    { name: "Tokens an hour", number: true, cell: ({ point }) => (point.hit_tokens_per_hour === null ? "–" : compact(point.hit_tokens_per_hour)) },
    { name: "Prefill saved an hour", number: true, cell: ({ point }) => (point.prefill_seconds_per_hour === null ? "–" : spent(point.prefill_seconds_per_hour)) },
    { name: "Knee", keep: true, cell: ({ curve }) => kneeOf(curve) },
  ], rows, "The size has changed: the curves begin anew with the next request that ends."), h("p", { class: "hint" }, "Changed by ", link("eviction_policy"), ", ", link("store_mode"), " and ", link("pool_bytes"), " while the service runs. Figures an hour come after the first minute of requests."));
}

function bias({ bias: texts }) {
  return h("details", { class: "card" }, h("summary", {}, "What the simulation leaves out"), h("ul", {}, texts.map((text) => h("li", {}, text))));
}

function autoCard({ auto, current }) {
  const chosen = [auto.eviction_policy ? "eviction policy" : null, auto.store_mode ? "store mode" : null].filter(Boolean);
  const text = chosen.length ? [`The service chooses the ${chosen.join(" and the ")} by itself. `,
    auto.eviction_policy && auto.store_mode ? null : ["Fixed: ", auto.eviction_policy ? link("store_mode", `store mode ${current.store_mode}`) : link("eviction_policy", `eviction policy ${current.eviction_policy}`), ". "],
    `It has compared ${count(auto.requests)} requests since its last switch or its start. A policy or mode that is set ends that.`] :
    ["Eviction policy and store mode are fixed. With the value auto of ", link("eviction_policy"), " or ", link("store_mode"), " the service switches to what is found to be best."];
  return card("auto", h("p", {}, text), table("The last switches, newest first", [
    { name: "Time", keep: true, cell: (one) => moment(one.time) },
    { name: "From", keep: true, cell: (one) => `${one.previous_eviction_policy}, ${one.previous_store_mode}` },
    { name: "To", keep: true, cell: (one) => nameOf(one) },
    { name: "Reason", cell: (one) => one.reason },
  ], auto.last, chosen.length ? "It has not switched yet." : "It has made no switch."));
}
