// Tiers: the storage below the pool, its health and its counts.

import { openapi } from "../api.js";
import { card, h, table } from "../dom.js";
import { count, name, percent, size } from "../format.js";
import { live } from "../live.js";

export const title = "Tiers";

/** Counts that are zero as long as a tier works. */
const FAULTS = new Set(["dropped", "corrupt", "failed", "cascades_dropped", "promotions_failed", "gave_up", "timed_out", "errors"]);

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
      [h("p", { class: "empty" }, "No tier is configured. The setting tiers names them, and needs a restart: ", h("a", { href: "#/config?setting=tiers" }, "configuration"), ".")]));
  };
  live.on("stats", signal, update);
  live.on("health", signal, update);
}

function tierCard(tier, stats, degraded, meanings) {
  const faults = degraded.filter((reason) => reason.startsWith(`tier ${tier}`));
  const isFault = (key) => FAULTS.has(key) && stats[key] > 0;
  const used = stats.max_bytes ? `, ${percent(stats.bytes, stats.max_bytes)} of ${size(stats.max_bytes)}` : "";
  return card(`Tier ${tier}`,
    faults.length ? h("ul", { class: "notice bad" }, faults.map((reason) => h("li", {}, reason))) : h("p", { class: "notice good" }, "It works."),
    h("p", {}, `It holds ${count(stats.blocks)} blocks, ${size(stats.bytes)}${used}. Of ${count(stats.looked_up)} blocks looked up it had ${percent(stats.found, stats.looked_up)}.`),
    table(`Counts of the tier ${tier}`, [
      { name: "Count", cell: (key) => name(key) },
      { name: "Value", number: true, cell: (key) => h("b", { class: isFault(key) ? "fault" : null }, key.endsWith("bytes") ? size(stats[key]) : count(stats[key])) },
      { name: "Meaning", cell: (key) => meanings[key]?.description ?? "" },
    ], Object.keys(stats)));
}
