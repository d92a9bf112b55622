// Overview: whether it works, what serves prompts, and why the rest is computed.

import { causeTexts, get } from "../api.js";
import { Chart } from "../chart.js";
import { card, every, facts, h, isNarrow, table } from "../dom.js";
import { compact, count, duration, memory, moment, name, percent, seconds, size, spent } from "../format.js";
import { DAY_S, HOUR_S, QUARTER_S, Samples } from "../history.js";
import { live } from "../live.js";

export const title = "Overview";

const SOURCES = [
  { column: "device_hit", label: "device", color: "device" },
  { column: "host_hit", label: "pool", color: "host" },
  { column: "tier_hit", label: "tiers", color: "tier" },
  { column: "recomputed", label: "computed", color: "computed" },
];
const HITS = ["device_hit", "host_hit", "tier_hit"];
/** What prompts began with: columns of numbers and of seconds to the first token end with these. */
const PREFIXES = [
  { prefix: "loaded", label: "loaded", color: "host" },
  { prefix: "device", label: "device only", color: "device" },
  { prefix: "none", label: "nothing found", color: "computed" },
];
/** Where to follow an advice, by its kind. */
const ADVICE_PAGES = {
  pool: ["#/config?setting=pool_bytes", "Change it"], lazy: ["#/config?setting=store_mode", "Change it"],
  tenant: ["#/pool", "Tenants"], break: ["#/breaks", "Breaks"], tier: ["#/tiers", "Tiers"],
};
const WINDOWS = { [QUARTER_S]: ["15 minutes", "#/overview"], [HOUR_S]: ["hour", "#/overview?window=hour"], [DAY_S]: ["day", "#/overview?window=day"] };
const STEP_S = { [QUARTER_S]: 5, [HOUR_S]: 60, [DAY_S]: 300 };
const MINUTE_S = 60;
/** A smaller loss, as a share of the time, is noise: as for `auto_pause`. */
const LOSS_SHARE = 0.005;
/** Where to change what a cause depends on. */
const REMEDIES = {
  "evicted.capacity": ["#/config?setting=pool_bytes", "size of the pool"],
  "evicted.reset": ["#/audit", "audit"],
  "evicted.operator": ["#/audit", "audit"],
  "causes.new": ["#/breaks", "breaks"],
  "causes.pin_limit": ["#/config?setting=pool_bytes", "size of the pool"],
  "causes.declined": ["#/config?setting=load_decision", "load decision"],
  "not_stored.no_space": ["#/config?setting=pool_bytes", "size of the pool"],
  "evicted.tenant_limit": ["#/pool", "tenants"],
  "not_stored.tenant_limit": ["#/pool", "tenants"],
  "not_stored.admission": ["#/config?setting=store_threshold", "store threshold"],
  "not_stored.prompt_only": ["#/policies", "policies"],
  "not_stored.token_cap": ["#/policies", "policies"],
};

/** Policy fields that a cause comes from: rules and defaults set them, and so do requests. */
const POLICY_FIELDS = { "causes.load_disabled": "load", "not_stored.disabled": "store" };

/** Return the policy fields that rules or defaults switch off for requests. */
async function forbiddenFields(signal) {
  const [policy, rules] = await Promise.all([get("policy", {}, signal), get("rules", { limit: 1000 }, signal)]);
  return new Set(Object.values(POLICY_FIELDS).filter((field) => !policy[field].value || rules.items.some((rule) => rule.policy[field] === false)));
}

export async function show(main, { query, signal }) {
  const windowS = { hour: HOUR_S, day: DAY_S }[query.get("window")] ?? QUARTER_S;
  const [texts, forbidden] = await Promise.all([causeTexts(signal), forbiddenFields(signal)]);
  const recent = new Samples(QUARTER_S);
  const shown = windowS === QUARTER_S ? recent : new Samples(windowS);
  const health = h("section", { class: "card health", "aria-label": "Health" });
  const tiles = h("div", { class: "tiles" });
  const balance = h("section", { class: "card balance", "aria-label": "Balance of offloading", hidden: true });
  const advice = h("section", { class: "card", "aria-label": "Advice", hidden: true });
  const charts = makeCharts(signal);
  const causes = h("div", {});
  const byLength = h("div", {});
  const counts = h("div", { class: "columns" });
  main.replaceChildren(
    h("h1", {}, title), health, balance, advice, tiles, windows(windowS), card("Why prompt tokens were computed", causes),
    charts.tokens.element,
    h("div", { class: "columns charts" }, charts.hits.element, charts.first.element),
    card("Time to first token, by length of the prompt", byLength),
    h("details", { class: "more", open: !isNarrow() }, h("summary", {}, "Bytes, slots, evictions, saved and spent"),
      h("div", { class: "columns charts" }, charts.bytes.element, charts.pool.element, charts.evictions.element, charts.balance.element)),
    h("details", { class: "more" }, h("summary", {}, "All counts"), counts),
  );
  live.on("health", signal, (state) => showHealth(health, state));
  live.on("stats", signal, (stats) => {
    showCounts(counts, stats);
    showTiles(tiles, recent, stats);
    showBalance(balance, stats.balance);
    showAdvice(advice, stats.advice);
  });
  async function update() {
    await recent.update(signal);
    draw(charts, shown, windowS);
    showFirstTokens(byLength, shown, windowS);
    showCauses(causes, shown, windowS, texts, forbidden);
    if (live.stats) showTiles(tiles, recent, live.stats);
  }
  if (shown !== recent) {
    await shown.update(signal);
    every(MINUTE_S, signal, () => shown.update(signal));
  }
  await update();
  every(2, signal, update);
}

function windows(windowS) {
  return h("div", { class: "choice", role: "group", "aria-label": "Time shown" }, Object.entries(WINDOWS).map(([span, [text, target]]) =>
    h("a", { href: target, "aria-current": Number(span) === windowS ? "true" : null }, text)));
}

function makeCharts(signal) {
  const bytesPerS = (value) => `${size(value)}/s`;
  const share = (value) => `${Math.round(value)} %`;
  return {
    tokens: new Chart("Where prompt tokens come from", {
      series: SOURCES, format: compact, stacked: true, note: "tokens per second",
    }, signal),
    hits: new Chart("Hit rate", {
      series: [{ label: "device, pool and tiers", color: "device" }, { label: "pool and tiers", color: "host" }],
      format: share, max: 100, note: "share of prompt tokens",
    }, signal),
    first: new Chart("Time to first token", {
      series: PREFIXES, format: seconds, note: "mean",
    }, signal),
    bytes: new Chart("Bytes moved", {
      series: [{ label: "stored", color: "tier" }, { label: "loaded", color: "host" }], format: bytesPerS, binary: true,
    }, signal),
    pool: new Chart("Slots of the pool", {
      series: [{ label: "ready", color: "host" }, { label: "storing", color: "tier" }, { label: "free", color: "free" }],
      format: compact, stacked: true, note: "at the end of each interval",
    }, signal),
    evictions: new Chart("Evictions", {
      series: [{ label: "evicted", color: "device" }, { label: "regretted", color: "bad" }],
      format: compact, note: "blocks per second; regretted: requested again afterwards",
    }, signal),
    balance: new Chart("Saved and spent by offloading", {
      series: [{ label: "saved", color: "host" }, { label: "spent", color: "bad" }], format: spent, note: "seconds per minute",
    }, signal),
  };
}

function draw(charts, samples, windowS) {
  const groups = samples.grouped(STEP_S[windowS]);
  const times = groups.map((group) => group.timeS);
  // A mark may be later than the last row of a minute.
  const toS = Math.max(times.at(-1) ?? Date.now() / 1000, samples.marks.at(-1)?.timeS ?? 0);
  const rates = (columns) => columns.map((column) => groups.map((group) => group.rate(column)));
  const last = (column) => groups.map((group) => group.last(column));
  const share = (columns) => groups.map((group) => {
    const total = SOURCES.reduce((sum, { column }) => sum + group.sum(column), 0);
    return total ? (100 * columns.reduce((sum, column) => sum + group.sum(column), 0)) / total : null;
  });
  const length = comparedLength(samples);
  const mean = ({ prefix }) => groups.map((group) => {
    const number = group.sum(`first_tokens_${prefix}.${length}`);
    return number ? group.sum(`first_token_s_${prefix}.${length}`) / number : null;
  });
  charts.first.note.textContent = `mean, of prompts of ${length} tokens, by what they began with`;
  const set = (chart, columns) => chart.set(toS - windowS, toS, times, columns, samples.marks);
  set(charts.tokens, rates(SOURCES.map(({ column }) => column)));
  set(charts.hits, [share(HITS), share(["host_hit", "tier_hit"])]);
  set(charts.first, PREFIXES.map(mean));
  set(charts.bytes, rates(["stored_bytes", "loaded_bytes"]));
  set(charts.pool, ["ready", "storing", "free"].map(last));
  set(charts.evictions, rates(["evicted", "regretted"]));
  charts.balance.element.hidden = !samples.has("gain_s");
  if (samples.has("gain_s")) set(charts.balance, rates(["gain_s", "cost_s"]).map((rate) => rate.map((value) => value && MINUTE_S * value)));
}

function showHealth(target, { ready, reasons, degraded, unreachable }) {
  const isWell = ready && !degraded.length;
  target.className = `card health ${ready ? (isWell ? "good" : "warn") : "bad"}`;
  const heading = unreachable ? "No connection: what is shown here is out of date" : isWell ? "Ready: everything works" : ready ? "Serving, but degraded" : "Not ready: send no traffic";
  const items = [...reasons, ...degraded].map((reason) => h("li", {}, reason, reason.startsWith("tier ") ? [" – ", h("a", { href: "#/tiers" }, "tiers")] : null));
  const text = `${heading}|${items.map((item) => item.textContent).join("|")}`;
  // Only a change is announced.
  if (target.dataset.text === text) return;
  target.dataset.text = text;
  target.replaceChildren(h("div", { role: isWell ? null : "alert" }, h("h2", {}, heading)), items.length ? h("ul", {}, items) : "");
}

/** Show what offloading saved and cost; the service may not measure it. */
function showBalance(target, balance) {
  target.hidden = !balance;
  if (!balance) return;
  const { window_s: windowS, cost_s: costS, gain_s: gainS, net_s: netS, total, prefill_tokens_per_s: rate } = balance;
  const cost = `Over the last ${duration(windowS)} offloading cost ${spent(costS ?? 0)}`;
  const text = !windowS ? "Nothing is measured yet." : gainS === null || gainS === undefined ? `${cost}. What it saved is not known until more prompts were computed.` :
    `Over the last ${duration(windowS)} offloading saved ${spent(gainS)} of prefill and cost ${spent(costS ?? 0)}.`;
  const paused = balance.paused ? `Storing is paused${balance.since ? ` since ${moment(balance.since)}` : ""}` :
    balance.storing === "probing" ? "Storing is being tried again" : null;
  const isLoss = netS < -LOSS_SHARE * windowS;
  target.className = `card balance ${balance.paused ? "bad" : isLoss || paused ? "warn" : netS < 0 ? "" : "good"}`;
  target.replaceChildren(...[h("h2", {}, text),
    paused ? h("p", { class: "error" }, balance.reason ? `${paused}: ${balance.reason}.` : `${paused}.`) : null,
    balance.paused ? h("p", {}, "Hits are still loaded. To store again at once, switch ", h("a", { href: "#/config?setting=auto_pause" }, "auto_pause"), " off.") : null,
    isLoss && !paused ? h("p", {}, "It costs more than it saves: ", h("a", { href: "#/config?setting=auto_pause" }, "auto_pause"),
      balance.auto_pause ? " pauses storing if that lasts." : " would pause storing if that lasts.") : null,
    facts([netS === null || netS === undefined ? null : [netS < 0 ? "net loss" : "net gain", spent(Math.abs(netS))],
      ["prompt tokens loaded", count(balance.saved_tokens)], ["requests waited for loads and tiers", spent(balance.load_wait_s ?? 0)], ["in the engine's hooks", spent(balance.hook_s ?? 0)],
      rate ? ["measured prefill", `${compact(rate)} tokens/s`] : null,
      total ? ["since the start", total.gain_s === null ? `cost ${spent(total.cost_s)}` : `saved ${spent(total.gain_s)}, cost ${spent(total.cost_s)}`] : null], true)].filter(Boolean));
}

/** Show the change that is worth most; an older service gives no advice. */
function showAdvice(target, advice) {
  target.hidden = !advice;
  if (!advice || target.dataset.text === advice.text) return;
  target.dataset.text = advice.text;
  const [page, text] = ADVICE_PAGES[advice.kind];
  target.replaceChildren(h("p", {}, `${advice.text} `, h("code", {}, advice.command), " ", h("a", { href: page }, text)));
}

function tile(label, value, note, kind = "") {
  return h("div", { class: `tile ${kind}` }, h("dt", {}, label), h("dd", {}, h("b", {}, value), h("small", {}, note)));
}

function showTiles(target, samples, { pool, evictions, requests, offloading }) {
  if (!samples.rows.length) return;
  const total = (lastS) => SOURCES.reduce((sum, { column }) => sum + samples.sum(column, lastS), 0);
  const hits = (lastS) => HITS.reduce((sum, column) => sum + samples.sum(column, lastS), 0);
  const regretted = samples.sum("regretted");
  const evicted = samples.sum("evicted");
  const length = comparedLength(samples);
  const means = PREFIXES.map((one) => [one.label, firstToken(samples, [one], length)]).filter(([, mean]) => mean !== "–").map((one) => one.join(" "));
  const isResizing = pool.wanted_slots !== pool.slots;
  target.replaceChildren(h("dl", {},
    tile("Hit rate", percent(hits(MINUTE_S), total(MINUTE_S)), total() ? `last minute; ${percent(hits(), total())} in 15 minutes` : "no prompts in 15 minutes"),
    tile("Tokens computed", `${compact(samples.rate("recomputed", MINUTE_S))}/s`,
      `of ${compact(SOURCES.reduce((sum, { column }) => sum + samples.rate(column, MINUTE_S), 0))}/s in prompts, last minute`),
    tile("First token", firstToken(samples, PREFIXES, length), means.length ? [`prompts of ${length} tokens`, ...means].join(", ") : "no request in 15 minutes"),
    tile("Loaded", `${size(samples.rate("loaded_bytes", MINUTE_S))}/s`, `${count(samples.sum("load_failed"))} failed in 15 minutes`,
      samples.sum("load_failed") ? "bad" : ""),
    tile("Stored", `${size(samples.rate("stored_bytes", MINUTE_S))}/s`, `${count(samples.sum("store_failed"))} failed in 15 minutes`,
      samples.sum("store_failed") ? "bad" : ""),
    tile("Pool in use", percent(pool.slots - pool.free, pool.slots),
      isResizing ? `resizing from ${count(pool.slots)} to ${count(pool.wanted_slots)} slots` : `${count(pool.free)} of ${count(pool.slots)} slots free`),
    tile("Evictions", `${compact(samples.rate("evicted", MINUTE_S))}/s`,
      `${evicted ? `${percent(regretted, evicted)} regretted` : "none"} in 15 minutes; ${count(evictions.total)} since the start`),
    tile("Requests", count(requests.running), `running, ${count(requests.waiting_for_load)} of them wait for a load`),
    !offloading.is_on ? tile("Offloading", "off", offloading.reason, "bad") : null,
  ));
}

/** Return the classes of prompts by their tokens, within which times compare. */
const lengths = (samples) => samples.columns("first_tokens_none.").map((column) => column.split(".")[1]);

/** Return the number of first tokens, or their seconds in all, by what prompts of one length began with. */
const firstTokens = (samples, column, prefixes, length) => prefixes.reduce((sum, { prefix }) => sum + samples.sum(`${column}_${prefix}.${length}`), 0);

/** Return the mean time to first token in the samples, of prompts of one length that began with one of these. */
function firstToken(samples, prefixes, length) {
  const number = firstTokens(samples, "first_tokens", prefixes, length);
  return number ? seconds(firstTokens(samples, "first_token_s", prefixes, length) / number) : "–";
}

/** Return the length of which most prompts were loaded, else of which there were most. */
function comparedLength(samples) {
  const number = (prefixes) => (length) => firstTokens(samples, "first_tokens", prefixes, length);
  const numLoaded = number(PREFIXES.slice(0, 1));
  const rank = lengths(samples).some(numLoaded) ? numLoaded : number(PREFIXES);
  return lengths(samples).reduce((best, length) => (rank(length) > rank(best) ? length : best));
}

function showFirstTokens(target, samples, windowS) {
  const rows = lengths(samples).filter((length) => firstTokens(samples, "first_tokens", PREFIXES, length));
  target.replaceChildren(table(`Mean time to first token, last ${WINDOWS[windowS][0]}`, [
    { name: "Prompt tokens", cell: (length) => length },
    ...PREFIXES.map((one) => ({ name: one.label, number: true, cell: (length) => {
      const number = firstTokens(samples, "first_tokens", [one], length);
      return number ? `${firstToken(samples, [one], length)} (${count(number)})` : "–";
    } })),
  ], rows, "No first token in this time."));
}

function showCauses(target, samples, windowS, texts, forbidden) {
  const rows = samples.columns("missed_tokens.").map((column) => {
    const [, part, cause] = column.split(".");
    return { part, cause, number: samples.sum(column) };
  }).filter(({ number }) => number).sort((one, other) => other.number - one.number);
  const text = JSON.stringify(rows);
  if (target.dataset.text === text || target.contains(document.activeElement)) return;
  target.dataset.text = text;
  const remedy = ({ part, cause }) => {
    const field = POLICY_FIELDS[`${part}.${cause}`];
    // What no rule and no default forbids, requests forbid themselves: each one's page names the source.
    const found = field ? (forbidden.has(field) ? ["#/policies", "policies"] : ["#/requests", "requests"]) : REMEDIES[`${part}.${cause}`];
    return found ? h("a", { href: found[0] }, found[1]) : "–";
  };
  target.replaceChildren(table("Prompt tokens computed, by cause", [
    { name: `Last ${WINDOWS[windowS][0]}`, number: true, cell: (row) => `${count(row.number)} (${percent(row.number, samples.sum("recomputed"))})` },
    { name: "Cause", cell: (row) => [texts.short[row.part]?.[row.cause] ?? `${name(row.part)}: ${name(row.cause)}`, h("small", {}, texts[row.part]?.[row.cause])] },
    { name: "Change", cell: remedy },
  ], rows, "No prompt was computed in this time."));
}

function showCounts(target, stats) {
  const { pool, store, load, evictions, journal, recovery, uptime_s: uptimeS, epoch } = stats;
  const list = (counts) => Object.entries(counts).filter(([, number]) => number).map(([key, number]) => [name(key), count(number)]);
  target.replaceChildren(
    card("Pool", facts([["size", `${size(pool.bytes)} in ${memory(stats)}`], ["eviction policy", pool.eviction_policy], ["store mode", h("span", { title: stats.store_mode.reason }, stats.store_mode.mode, stats.store_mode.setting === "auto" ? " (auto)" : "")],
      ["slot", size(pool.slot_bytes)], ["loading", count(pool.loading)], ["pinned: not evicted", count(pool.pinned)],
      ["not verified", count(pool.unverified)], ["all blocks dropped", `${count(epoch)} times`], ["up", seconds(uptimeS)]])),
    card("Blocks stored, since the start", facts([["considered", count(store.offered)], ["stored", count(store.stored)],
      ["in flight", count(store.in_flight)], ["failed", count(store.failed)],
      ...list(store.skipped).map(([key, number]) => [`not: ${key}`, number])])),
    card("Blocks loaded, since the start", facts([["loaded", count(load.blocks)], ["in flight", count(load.in_flight)],
      ["declined: found, not loaded", count(load.declined)], ["failed", count(load.failed)], ["corrupt", count(load.corrupt)]])),
    card("Evictions, since the start", facts([...list(evictions.by_reason), ["in all", count(evictions.total)], ["regretted", count(evictions.regretted)]])),
    card("History", facts([["rows queued", count(journal.queued)], ["written", count(journal.written)],
      ["dropped", count(journal.dropped)], ["behind", seconds(journal.lag_s)]])),
    recovery ? card("Since the restart", facts([["slots recovered", count(recovery.recovered)], ["with history", count(recovery.known)],
      ["empty", count(recovery.empty)], ["in", seconds(recovery.seconds)], ...list(recovery.dropped).map(([key, number]) => [`lost: ${key}`, number])])) : "",
  );
}
