// Tiers: the storage below the pool, its health and its counts.

import { openapi } from "../api.js";
import { card, facts, h, table } from "../dom.js";
import { count, name, percent, size } from "../format.js";
import { live } from "../live.js";
import { openReset } from "../reset.js";

export const title = "Tiers";

/** Counts that are zero as long as a tier works. */
const FAULTS = new Set(["dropped", "corrupt", "failed", "cascades_dropped", "promotions_failed", "gave_up", "timed_out", "errors", "problems"]);

export async function show(main, { signal }) {
  const meanings = (await openapi()).components.schemas.TierStats.properties;
  const list = h("div", {});
  main.replaceChildren(h("h1", {}, title), list);
  let shown = "";
  const update = () => {
    if (!live.stats || list.contains(document.activeElement)) return;
    const text = JSON.stringify([live.stats.tiers, live.health?.degraded]);
    if (text === shown) return;
    shown = text;
    const found = Object.entries(live.stats.tiers);
    list.replaceChildren(...(found.length ? found.map(([tier, stats]) => tierCard(tier, stats, live.health?.degraded ?? [], meanings)) :
      [h("p", { class: "empty" }, "No tier is attached. ", h("code", {}, "kvferry tiers attach"), " attaches one until the next start; the setting tiers names those that every start attaches: ", h("a", { href: "#/config?setting=tiers" }, "configuration"), ".")]));
  };
  live.on("stats", signal, update);
  live.on("health", signal, update);
}

/** Return a tier: whether it works, what it holds and serves, what waits for it, and what went wrong. */
function tierCard(tier, stats, degraded, meanings) {
  const reasons = degraded.filter((reason) => reason.startsWith(`tier ${tier}:`));
  const wrong = Object.keys(stats).filter((key) => FAULTS.has(key) && stats[key] > 0);
  const limit = stats.max_bytes ? ` of ${size(stats.max_bytes)} (${percent(stats.bytes, stats.max_bytes)})` : "";
  const counts = table(`Counts of the tier ${tier}`, [
    { name: "Count", cell: (key) => name(key) },
    { name: "Value", number: true, cell: (key) => h("b", { class: wrong.includes(key) ? "fault" : null }, key.endsWith("bytes") ? size(stats[key]) : count(stats[key])) },
    { name: "Meaning", cell: (key) => meanings[key]?.description ?? "" },
  ], Object.keys(stats));
  return card(`Tier ${tier}`,
    reasons.length ? h("ul", { class: "notice bad" }, reasons.map((reason) => h("li", {}, reason))) : h("p", { class: "notice good" }, "It works."),
    facts([["holds", `${count(stats.blocks)} blocks`], ["size", `${size(stats.bytes)}${limit}`],
      ["hits", `${percent(stats.found, stats.looked_up)} of ${count(stats.looked_up)} blocks looked up`],
      ["queue", stats.open_jobs ? `${count(stats.open_jobs)} jobs` : "empty"],
      ["stored", `${count(stats.stored)} blocks, ${size(stats.stored_bytes)}`], ["loaded", `${count(stats.loaded)} blocks, ${size(stats.loaded_bytes)}`],
      ["evicted", `${count(stats.evicted)} blocks`]], true),
    wrong.length ? h("h3", {}, "What went wrong, since the start") : null,
    wrong.length ? h("ul", { class: "reasons" }, wrong.map((key) => h("li", {}, h("b", { class: "fault" }, count(stats[key])), ` ${name(key)}: ${meanings[key]?.description ?? ""}`))) : null,
    h("div", { class: "buttons" }, h("button", { type: "button", onclick: () => openReset(() => {}, tier) }, `Reset ${tier}…`)),
    h("details", { open: opened.has(tier), ontoggle: ({ target }) => (target.open ? opened.add(tier) : opened.delete(tier)) },
      h("summary", {}, "All counts", h("span", { class: "hidden" }, ` of ${tier}`)), counts));
}

/** Tiers of which all counts are shown. */
const opened = new Set();
