// Pool: a map of all slots, and the blocks, which can be pinned and dropped.

import { get, put, remove } from "../api.js";
import { openDialog } from "../dialog.js";
import { card, every, facts, field, h, pagedTable } from "../dom.js";
import { count, moment, percent, seconds, shortHash, size } from "../format.js";
import { live } from "../live.js";
import { SlotMap } from "../slot_map.js";

export const title = "Pool";

const DEFAULT_PIN_S = 3600;
const REFRESH_S = 5;

export async function show(main, { query, signal, refresh }) {
  const wanted = query.get("hash") || "";
  const map = new SlotMap(signal);
  const numbers = h("div", {});
  const pages = pagedTable("Blocks by slot", columns(refresh), (cursor) => load(wanted, cursor, signal),
    wanted ? "The pool does not hold this block." : "The pool holds no blocks.");
  const [states] = await Promise.all([get("slots/map", {}, signal), pages.first]);
  const search = h("form", { class: "filters", onsubmit(event) {
    event.preventDefault();
    const hash = new FormData(event.target).get("hash").trim();
    location.hash = hash ? `#/pool?hash=${encodeURIComponent(hash)}` : "#/pool";
  } }, field("Hash of a block", h("input", { name: "hash", value: wanted, autocomplete: "off", spellcheck: "false" })), h("button", {}, "Find"),
    wanted ? h("a", { href: "#/pool" }, "Show all") : null);
  main.replaceChildren(h("h1", {}, title), numbers, card("Slots", map.element), card("Blocks", search, pages.element));
  map.set(states);
  live.on("stats", signal, ({ pool }) => numbers.replaceChildren(facts([
    ["slots", `${count(pool.slots)} of ${size(pool.slot_bytes)}`], ["in use", percent(pool.slots - pool.free, pool.slots)],
    ["ready", count(pool.ready)], ["storing", count(pool.storing)], ["loading", count(pool.loading)], ["pinned", count(pool.pinned)],
    ["eviction policy", pool.eviction_policy], ["kind", pool.kind]], true)));
  every(REFRESH_S, signal, async () => { if (!document.hidden) map.set(await get("slots/map", {}, signal)); });
}

async function load(hash, cursor, signal) {
  if (!hash) return get("blocks", { limit: 50, cursor }, signal);
  try {
    return { items: [await get(`blocks/${encodeURIComponent(hash)}`, {}, signal)], next_cursor: null };
  } catch (error) {
    if (error.status === 404) return { items: [], next_cursor: null };
    throw error;
  }
}

function columns(refresh) {
  return [
    { name: "Block", cell: (one) => h("code", { title: one.hash }, shortHash(one.hash)) },
    { name: "Slot", number: true, cell: (one) => count(one.slot) },
    { name: "Stored by", cell: (one) => h("a", { href: `#/requests/${encodeURIComponent(one.request)}` }, one.request) },
    { name: "State", cell: (one) => one.state },
    { name: "Position", number: true, cell: (one) => count(one.position) },
    { name: "Hits", number: true, cell: (one) => count(one.hits) },
    { name: "Stored", cell: (one) => moment(one.stored_at) },
    { name: "Last hit", cell: (one) => moment(one.last_hit) },
    { name: "Pinned until", cell: (one) => moment(one.pinned_until) },
    { name: "Held by", cell: (one) => one.tiers.map((tier) => (tier === "host" ? "pool" : tier)).join(", ") },
    { name: "Change", cell: (one) => h("div", { class: "buttons" },
      h("button", { type: "button", "aria-label": `Pin block ${shortHash(one.hash)}`, onclick: () => openPin(one, refresh) }, one.pinned_until ? "Pin longer…" : "Pin…"),
      one.pinned_until ? h("button", { type: "button", "aria-label": `Unpin block ${shortHash(one.hash)}`, onclick: () => openUnpin(one, refresh) }, "Unpin…") : null,
      h("button", { type: "button", "aria-label": `Drop block ${shortHash(one.hash)}`, onclick: () => openDrop(one, refresh) }, "Drop…")) },
  ];
}

const pathOf = ({ hash }, suffix = "") => `blocks/${hash}${suffix}`;

function openPin(block, done) {
  openDialog({
    title: `Pin block ${shortHash(block.hash)}`,
    form: [field("For how many seconds", h("input", { name: "ttl_s", type: "number", min: 1, step: "any", value: String(DEFAULT_PIN_S), required: true }))],
    async review({ ttl_s: ttlS }) {
      const { max_pinned_fraction: limit } = await get("config");
      return {
        lines: [`The block stays in the pool for ${seconds(Number(ttlS))}, whatever needs its slot. A reset or a drop still removes it.`,
          `Operators may pin ${percent(limit.value, 1)} of the pool (max_pinned_fraction).`, "The pin ends with the process."],
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
      lines: [`The block at position ${block.position} of ${block.request} is dropped from the pool and from all tiers.`,
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
