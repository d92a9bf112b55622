// Pool: a map of all slots, the blocks, which can be pinned and dropped, and the tenants.

import { get, put, remove } from "../api.js";
import { openDialog } from "../dialog.js";
import { card, changeButton, every, facts, field, firstRows, h, pagedTable, requestLink, select, withChanges } from "../dom.js";
import { count, memory, moment, percent, seconds, shortHash, size } from "../format.js";
import { live } from "../live.js";
import { openReset } from "../reset.js";
import { SlotMap } from "../slot_map.js";

export const title = "Pool";

const DEFAULT_PIN_S = 3600;
const REFRESH_S = 5;
/** Beyond this number of slots the map is read less often. */
const MANY_SLOTS = 200000;
const MANY_TURNS = 12;
const TENANTS = 20;
const BY = [["state", "state"], ["age", "age"], ["hits", "hits"], ["tenant", "tenant"]];

/** Return the slots of the address, such as 128-255 or 128, or null. */
function slotsOf(text) {
  const match = /^(\d{1,9})(?:-(\d{1,9}))?$/.exec(text ?? "");
  return match && [Number(match[1]), Number(match[2] ?? match[1])];
}

export async function show(main, { query, signal, refresh }) {
  const wanted = query.get("hash") || "";
  const slots = slotsOf(query.get("slots"));
  const by = select("by", BY, query.get("by") || "state");
  const addressOf = (first, last) => `#/pool?${new URLSearchParams({ by: by.value, slots: first === last ? first : `${first}-${last}` })}`;
  const map = new SlotMap({ onChoose: (first, last) => { location.hash = addressOf(first, last); }, linkOf: addressOf }, signal);
  const numbers = h("div", {});
  const pages = pagedTable("Blocks by slot", columns(refresh), (cursor) => load(wanted, slots, cursor, signal),
    wanted ? "The pool does not hold this block." : slots ? "These slots hold no blocks that can be loaded." : "The pool holds no blocks.");
  const tenants = pagedTable("Tenants by bytes in the pool", TENANT_COLUMNS, (cursor) => get("tenants", { limit: TENANTS, cursor }, signal),
    "No request has finished so far.");
  await Promise.all([pages.first, tenants.first]);
  const search = h("form", { class: "filters", onsubmit(event) {
    event.preventDefault();
    const hash = new FormData(event.target).get("hash").trim();
    location.hash = hash ? `#/pool?hash=${encodeURIComponent(hash)}` : "#/pool";
  } }, field("Hash of a block", h("input", { name: "hash", value: wanted, autocomplete: "off", spellcheck: "false" })),
    h("button", {}, "Find"));
  const range = h("form", { class: "filters", onsubmit(event) {
    event.preventDefault();
    const [first, last] = slotsOf(new FormData(event.target).get("slots").trim()) ?? [];
    if (last >= first) location.hash = addressOf(first, last);
  } }, field("Slots, as 0-99", h("input", { name: "slots", value: slots ? slots.join("-") : "", pattern: "\\s*\\d{1,9}(-\\d{1,9})?\\s*", autocomplete: "off", required: true })),
    h("button", {}, "Show"));
  const heading = wanted ? "Block" : slots ? `Blocks of the slots ${count(slots[0])} to ${count(slots[1])}` : "Blocks";
  const blocks = card(heading, h("div", { class: "filter-row" }, search, range, wanted || slots ? h("p", {}, h("a", { href: `#/pool?by=${by.value}` }, "Show all")) : null), pages.element);
  const reset = changeButton({ class: "danger", onclick: () => openReset(refresh) }, "Reset…");
  main.replaceChildren(h("h1", {}, title), numbers, card("Slots", h("div", { class: "filters" }, field("Color by", by)), map.element, h("div", { class: "buttons" }, reset)),
    card("Tenants", tenants.element, h("p", { class: "hint" }, "At its limit a tenant loses its own coldest blocks. ", h("code", {}, "kvferry tenants limit"), " sets the limit of one, the setting ",
      h("a", { href: "#/config?setting=tenant_max_bytes" }, "tenant_max_bytes"), " that of all others.")), blocks);
  async function showMap() {
    map.set(await get("slots/map", { by: by.value, cells: map.numCells }, signal), slots);
  }
  by.addEventListener("change", () => {
    const next = new URLSearchParams(query);
    next.set("by", by.value);
    history.replaceState(null, "", `#/pool?${next}`);
    showMap().catch(() => {});
  });
  await showMap();
  if (slots || wanted) blocks.querySelector("h2").scrollIntoView({ block: "nearest" });
  live.on("stats", signal, ({ pool, engine }) => numbers.replaceChildren(facts([
    ["slots", `${count(pool.slots)} of ${size(pool.slot_bytes)}`], ["in use", percent(pool.slots - pool.free, pool.slots)],
    ["ready", count(pool.ready)], ["storing", count(pool.storing)], ["loading", count(pool.loading)], ["pinned: not evicted", count(pool.pinned)],
    ["eviction policy", pool.eviction_policy], ["memory", memory({ pool, engine })]], true)));
  let turn = 0;
  every(REFRESH_S, signal, async () => {
    turn += 1;
    const isDue = (live.stats?.pool.slots ?? 0) <= MANY_SLOTS || turn % MANY_TURNS === 0;
    if (isDue && !document.hidden) await showMap();
  });
}

async function load(hash, slots, cursor, signal) {
  if (!hash) return get("blocks", { limit: firstRows(), cursor, first_slot: slots?.[0], last_slot: slots?.[1] }, signal);
  try {
    return { items: [await get(`blocks/${encodeURIComponent(hash)}`, {}, signal)], next_cursor: null };
  } catch (error) {
    if (error.status === 404) return { items: [], next_cursor: null };
    throw error;
  }
}

function columns(refresh) {
  return withChanges([
    { name: "Block", keep: true, cell: (one) => h("code", { title: one.hash }, shortHash(one.hash)) },
    { name: "Slot", number: true, cell: (one) => count(one.slot) },
    { name: "Stored by", cell: (one) => requestLink(one.request) },
    { name: "State", keep: true, cell: (one) => one.state },
    { name: "Position", number: true, cell: (one) => count(one.position) },
    { name: "Hits", number: true, cell: (one) => count(one.hits) },
    { name: "Stored", keep: true, cell: (one) => moment(one.stored_at) },
    { name: "Last hit", keep: true, cell: (one) => moment(one.last_hit) },
    { name: "Pinned until", keep: true, cell: (one) => moment(one.pinned_until) },
    { name: "Held by", keep: true, cell: (one) => one.tiers.map((tier) => (tier === "host" ? "pool" : tier)).join(", ") },
  ], { name: "Change", cell: (one) => h("div", { class: "buttons" },
    changeButton({ "aria-label": `Pin block ${shortHash(one.hash)}`, onclick: () => openPin(one, refresh) }, one.pinned_until ? "Pin longer…" : "Pin…"),
    one.pinned_until ? changeButton({ "aria-label": `Unpin block ${shortHash(one.hash)}`, onclick: () => openUnpin(one, refresh) }, "Unpin…") : null,
    changeButton({ "aria-label": `Drop block ${shortHash(one.hash)}`, onclick: () => openDrop(one, refresh) }, "Drop…")) });
}

const TENANT_COLUMNS = [
  { name: "Tenant", keep: true, cell: (one) => (one.tenant ? h("code", {}, one.tenant) : "no tenant") },
  { name: "In the pool", number: true, cell: (one) => size(one.pool_bytes) },
  { name: "Limit", number: true, cell: ({ max_pool_bytes: limit }) => (limit.value === "unlimited" ? "none" : size(limit.value)) },
  { name: "Limit from", cell: (one) => one.max_pool_bytes.source },
  { name: "Stored since the start", number: true, cell: (one) => size(one.stored_bytes) },
  { name: "Prompt tokens", number: true, cell: (one) => count(one.prompt_tokens.total) },
  { name: "From device", number: true, cell: (one) => percent(one.prompt_tokens.device_hit, one.prompt_tokens.total) },
  { name: "From pool", number: true, cell: (one) => percent(one.prompt_tokens.host_hit, one.prompt_tokens.total) },
  { name: "From tiers", number: true, cell: (one) => percent(Object.values(one.prompt_tokens.tier_hit).reduce((sum, tokens) => sum + tokens, 0), one.prompt_tokens.total) },
];

const pathOf = ({ hash }, suffix = "") => `blocks/${hash}${suffix}`;

function openPin(block, done) {
  openDialog({
    title: `Pin block ${shortHash(block.hash)}`,
    form: [field("For how many seconds", h("input", { name: "ttl_s", type: "number", min: 1, step: "any", value: String(DEFAULT_PIN_S), required: true }))],
    async review({ ttl_s: ttlS }) {
      const { max_pinned_fraction: limit } = await get("config");
      const { pool } = live.stats;
      return {
        lines: [`The block stays in the pool for ${seconds(Number(ttlS))}, whatever needs its slot. A reset or a drop still removes it.`,
          `Operators may pin ${count(Math.floor(limit.value * pool.slots))} blocks, ${percent(limit.value, 1)} of the pool (max_pinned_fraction); ${count(pool.pinned)} are pinned now, by operators or requests.`, "The pin ends with the process."],
        confirm: "Pin the block",
      };
    },
    async apply({ ttl_s: ttlS }) {
      const { pinned_until: until } = await put(pathOf(block, "/pin"), { ttl_s: Number(ttlS) });
      return `The block is pinned until ${moment(until)}.`;
    },
    done,
  });
}

function openUnpin(block, done) {
  openDialog({
    title: `Unpin block ${shortHash(block.hash)}`,
    review: () => ({ lines: ["The block may be evicted again."], confirm: "Unpin the block" }),
    async apply() {
      await remove(pathOf(block, "/pin"));
      return "The block is unpinned.";
    },
    done,
  });
}

function openDrop(block, done) {
  openDialog({
    title: `Drop block ${shortHash(block.hash)}`,
    review: () => ({
      lines: [`The block at position ${block.position} of ${block.request} (${size(block.size)}, ${count(block.hits)} hits) is dropped from ${block.tiers.map((tier) => (tier === "host" ? "the pool" : tier)).join(" and ")}, and from any other tier that holds it.`,
        "Prompts that begin with it are computed from there on, also where later blocks are held.", "It cannot be undone."],
      confirm: "Drop the block",
      danger: true,
    }),
    async apply() {
      await remove(pathOf(block));
      return "The block is dropped.";
    },
    done,
  });
}
