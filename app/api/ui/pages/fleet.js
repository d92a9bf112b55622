// Fleet: the engines that share the metadata store, how they do, and which of them exchange blocks.

import { get } from "../api.js";
import { card, every, facts, h, shareBar, sparkline, table } from "../dom.js";
import { count, duration, moment, percent, size } from "../format.js";

export const title = "Fleet";

const REFRESH_S = 5;
const PAGE = 1000;
const TENANTS = 100;
/** Styles of states. */
const KINDS = { alive: "running", lost: "bad", ended: "ended" };

export async function show(main, { signal }) {
  const summary = h("div", {});
  const list = h("div", {});
  const tiers = h("div", {});
  const tenants = h("div", {});
  const load = async () => {
    const [engines, largest] = await Promise.all([allEngines(signal), get("fleet/tenants", { limit: TENANTS }, signal)]);
    summary.replaceChildren(...summaryOf(engines));
    list.replaceChildren(table("Engines by name", COLUMNS, engines));
    tiers.replaceChildren(sharedTiers(engines));
    tenants.replaceChildren(tenantsTable(largest.items));
  };
  await load();
  main.replaceChildren(h("h1", {}, title),
    h("p", { class: "hint" }, "Engines with the same metadata store (setting database_url), as each described itself in the last seconds."),
    summary, list, card("Shared tiers", tiers),
    card("Tenants", h("p", { class: "hint" }, `Bytes in the pools of the engines that are alive, of the ${TENANTS} largest tenants.`), tenants));
  every(REFRESH_S, signal, async () => {
    // What is being read or used stays.
    const isUsed = [list, tiers, tenants].some((part) => part.contains(document.activeElement) || part.matches(":hover"));
    if (!isUsed && !document.hidden) await load();
  });
}

async function allEngines(signal) {
  const engines = [];
  let cursor = null;
  do {
    const page = await get("fleet", { limit: PAGE, cursor }, signal);
    engines.push(...page.items.map((one) => (one.unreadable ? { ...one, id: one.name } : one)));
    cursor = page.next_cursor;
  } while (cursor);
  return engines;
}

function summaryOf(engines) {
  const readable = engines.filter((one) => !one.unreadable);
  const alive = readable.filter((one) => one.state === "alive");
  const sum = (of) => alive.reduce((total, one) => total + (of(one) ?? 0), 0);
  const tokens = (key) => sum(({ recent }) => recent?.[key]);
  const hits = tokens("device_hit") + tokens("host_hit") + tokens("tier_hit");
  const states = ["alive", "lost", "ended"].map((state) => [state, readable.filter((one) => one.state === state).length]);
  const alone = readable.length <= 1 ? h("p", { class: "notice" },
    "Only this engine uses its metadata store. Others appear here once they have the same ", h("a", { href: "#/config?setting=database_url" }, "database_url"),
    ", a PostgreSQL server or on one host an SQLite file, and each an ", h("a", { href: "#/config?setting=engine_name" }, "engine_name"), " of its own.") : null;
  return [alone, facts([["engines", states.filter(([, number]) => number).map(([state, number]) => `${count(number)} ${state}`).join(", ")],
    ["hit rate", `${percent(hits, hits + tokens("recomputed"))} in 5 minutes`],
    ["pools", size(sum(({ pool }) => pool.bytes))],
    ["slots in use", percent(sum(({ pool }) => pool.used_slots), sum(({ pool }) => pool.slots))]], true)].filter(Boolean);
}

const COLUMNS = [
  { name: "Engine", keep: true, cell: (one) => [one.state === "alive" && /^https?:/.test(one.url ?? "") ? h("a", { href: `${one.url}/ui/` }, one.name) : h("b", {}, one.name),
    one.answering ? h("small", {}, "this one") : null] },
  { name: "State", keep: true, cell: (one) => [h("span", { class: `state state-${KINDS[one.state]}` }, one.state),
    one.state === "alive" ? null : h("small", {}, `since ${moment(one.ended_at ?? one.seen_at)}`)] },
  { name: "Runs", cell: (one) => (one.model ? [one.model, h("small", {}, `${one.kind}, kvferry ${one.version ?? "of unknown version"}`)] : "–") },
  { name: "Host", cell: (one) => (one.host ? [one.host, one.url ? h("small", {}, one.url) : null] : "–") },
  { name: "Hit rate", keep: true, cell: hitRate },
  { name: "Pool", keep: true, cell: pool },
  { name: "Started", keep: true, cell: (one) => moment(one.started_at) },
  { name: "Last seen", keep: true, cell: (one) => moment(one.seen_at) },
];

function hitRate({ name, recent }) {
  if (!recent?.window_s) return "–";
  const { hit_rate: rate, hit_rates: rates, window_s: windowS } = recent;
  const number = rate === null ? "no prompts" : rate === 0 ? "0 %" : percent(rate, 1);
  return [h("span", {}, number), h("small", {}, `last ${duration(windowS)}`), sparkline(rates, `Hit rate of ${name} by minute`, (value) => percent(value, 1))];
}

function pool({ pool: { bytes, slots, used_slots: used } }) {
  if (!slots) return bytes === null ? "–" : size(bytes);
  const bar = shareBar([["host", used, "in use"], ["free", slots - used, "free"]]);
  bar.classList.add("thin");
  return [size(bytes), h("small", {}, `${percent(used, slots)} in use`), bar];
}

/** Return which engines exchange blocks: those that are alive, by the namespace of their tiers. */
function sharedTiers(engines) {
  const groups = new Map();
  for (const engine of engines.filter((one) => one.state === "alive")) {
    for (const tier of engine.tiers.filter((one) => one.namespace !== null)) {
      if (!groups.has(tier.namespace)) groups.set(tier.namespace, { ...tier, members: [] });
      groups.get(tier.namespace).members.push(engine.tiers.length > 1 ? `${engine.name} (${tier.name})` : engine.name);
    }
  }
  const rows = [...groups.values()].sort((one, other) => other.members.length - one.members.length);
  return h("div", {}, rows.length ? h("p", { class: "hint" }, "What one engine of a row stores in the tier, the others load. Engines of another model or layout have another namespace.") : null,
    table("Engines by the namespace of their tiers", [
      { name: "Tier", keep: true, cell: (one) => one.type },
      { name: "Namespace", keep: true, cell: (one) => h("code", {}, one.namespace) },
      { name: "Shared by", keep: true, cell: (one) => (one.members.length > 1 ? `${count(one.members.length)} engines` : "one engine") },
      { name: "Engines", cell: (one) => one.members.join(", ") },
    ], rows, "No engine that is alive has reached a tier that engines can share."));
}

function tenantsTable(tenants) {
  return table("Tenants with the most bytes in all pools", [
    { name: "Tenant", keep: true, cell: (one) => (one.tenant ? h("code", {}, one.tenant) : "no tenant") },
    { name: "In all pools", number: true, cell: (one) => size(one.pool_bytes) },
    { name: "Engines", number: true, cell: (one) => count(one.engines) },
  ], tenants, "The pools hold no blocks.");
}
