// What if: what caches of other sizes would have served.

import { get } from "../api.js";
import { Chart } from "../chart.js";
import { card, every, facts, h } from "../dom.js";
import { compact, moment, size, spent } from "../format.js";

export const title = "What if";

const REFRESH_S = 10;
/** Return a share with a decimal, since a point is a lot. */
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const link = (setting, text = setting) => h("a", { href: `#/config?setting=${setting}` }, text);
const SERIES = [
  { label: "everything kept", color: "faint", dash: [2, 4] },
  { label: "one cache", color: "device" },
  { label: "eager here", color: "host", isPoint: true },
  { label: "lazy here", color: "tier", isPoint: true },
];

export async function show(main, { signal }) {
  const parts = { state: h("div", {}), notes: h("div", {}) };
  const chart = new Chart("Share of prompt tokens served", { series: SERIES, format: percent, max: 1,
    note: "over the size of one LRU cache", along: { name: "Size", format: size } }, signal);
  const load = async () => {
    const answer = await get("what-if", {}, signal);
    parts.state.replaceChildren(stateOf(answer));
    parts.notes.replaceChildren(h("details", { class: "card" }, h("summary", {}, "What is left out"),
      h("ul", {}, answer.notes.map((text) => h("li", {}, text)))));
    chart.element.hidden = !answer.points.length;
    if (answer.points.length) draw(chart, answer);
  };
  await load();
  main.replaceChildren(h("h1", {}, title),
    h("p", { class: "hint" }, "Which share of the prompt tokens of ended requests one LRU cache of each size would have served. In eager mode the pool holds what the device does, so that both serve what the larger one would; in lazy mode they serve what one cache of both sizes would."),
    parts.state, chart.element, parts.notes);
  every(REFRESH_S, signal, async () => {
    // What is being read or used stays.
    const isUsed = [...Object.values(parts), chart.element].some((part) => part.contains(document.activeElement) || part.matches(":hover"));
    if (!isUsed && !document.hidden) await load();
  });
}

function stateOf(answer) {
  const { current, next_gib: nextGib } = answer;
  if (!answer.points.length) {
    return h("p", { class: "notice" }, "No request was counted yet. Requests count as they end, while ", link("what_if"), " is true.");
  }
  return card("Now", facts([
    ["pool", size(current.pool_bytes)],
    ["device", current.device_bytes ? size(current.device_bytes) : "unknown"],
    ["policy and mode", [link("eviction_policy", current.eviction_policy), ", ", link("store_mode", current.store_mode)]],
    ["measured", percent(current.hit_rate)],
    ["eager here", percent(answer.eager)],
    ["lazy here", percent(answer.lazy)],
    ["everything kept", percent(answer.ceiling)],
    ["the next GiB finds", nextGib.hit_tokens_per_hour === null ? "not measured yet" : `${compact(nextGib.hit_tokens_per_hour)} more tokens an hour`],
    ["and saves", nextGib.prefill_seconds_per_hour === null ? "not measured yet" : `${spent(nextGib.prefill_seconds_per_hour)} of prefill an hour`],
    ["counted", `${compact(answer.prompt_tokens)} prompt tokens since ${moment(answer.since)}`],
    ["sample", answer.sampled === 1 ? "all keys" : `${percent(answer.sampled)} of the keys`],
  ], true));
}

function draw(chart, { points, current, eager, lazy, ceiling }) {
  const marks = [[Math.max(current.pool_bytes, current.device_bytes), eager], [current.pool_bytes + current.device_bytes, lazy]];
  const rates = new Map([...points.map((point) => [point.bytes, point.hit_rate]), ...marks]);
  const sizes = [...rates.keys()].sort((one, other) => one - other);
  const mark = ([at, rate]) => sizes.map((bytes) => (bytes === at ? rate : null));
  chart.set(sizes[0] / 1.2, sizes.at(-1) * 1.2, sizes, [sizes.map(() => ceiling), sizes.map((bytes) => rates.get(bytes)), ...marks.map(mark)]);
}
