// Tiers: the storage below the pool, its health and its counts; attaching, disabling, detaching and flushing to it.

import { get, openapi, post, put, remove } from "../api.js";
import { invalid, openDialog } from "../dialog.js";
import { card, changeButton, facts, field, h, table } from "../dom.js";
import { count, name, percent, seconds, size, value as text } from "../format.js";
import { live } from "../live.js";
import { openReset } from "../reset.js";

export const title = "Tiers";

/** Counts that are zero as long as a tier works. */
const FAULTS = new Set(["dropped", "corrupt", "failed", "cascades_dropped", "promotions_failed", "gave_up", "timed_out", "errors"]);

const NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;
const EXAMPLE = '{"type": "fs", "path": "/var/kvferry", "max_bytes": "100GiB"}';
const DRAIN_S = 10;
const UNTIL_RESTART = "It holds until the next start, which attaches the tiers of the setting tiers.";

export async function show(main, { signal, refresh }) {
  const [{ items: attached }, { components }] = await Promise.all([get("tiers", {}, signal), openapi(signal)]);
  const meanings = components.schemas.TierStats.properties;
  const byName = new Map(attached.map((one) => [one.name, one]));
  const isFlushing = () => [...byName.values()].some(({ flush }) => flush?.state === "running");
  const list = h("div", {});
  main.replaceChildren(h("h1", {}, title), list,
    h("div", { class: "buttons" }, changeButton({ onclick: () => openAttachment(attached, refresh) }, "Attach a tier…")));
  let shown = "";
  const update = () => {
    // What has the focus stays, and what gets it back from a dialog.
    if (!live.stats || list.contains(document.activeElement) || document.querySelector("dialog")) return;
    const text = JSON.stringify([live.stats.tiers, live.health?.degraded, [...byName.values()].map(({ flush }) => flush)]);
    if (text === shown) return;
    shown = text;
    const found = Object.entries(live.stats.tiers);
    list.replaceChildren(...(found.length ? found.map(([tier, stats]) => tierCard(byName.get(tier), tier, stats, meanings, refresh)) :
      [h("p", { class: "empty" }, "No tier is attached. The setting tiers names those that every start attaches: ", h("a", { href: "#/config?setting=tiers" }, "configuration"), ".")]));
  };
  live.on("stats", signal, () => {
    update();
    if (!isFlushing()) return;
    // One that fails is repeated with the next stats.
    get("tiers", {}, signal).then(({ items }) => {
      for (const one of items) byName.set(one.name, one);
      update();
    }, () => {});
  });
  live.on("health", signal, update);
}

/** Return a tier: whether it works, what it holds and serves, what waits for it, and what went wrong. */
function tierCard(state, tier, stats, meanings, refresh) {
  const reasons = (live.health?.degraded ?? []).filter((reason) => reason.startsWith(`tier ${tier}:`));
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
      ["answers in", seconds(stats.look_up_s)],
      ["jobs under way", stats.open_jobs ? count(stats.open_jobs) : "none"],
      ["stored", `${count(stats.stored)} blocks, ${size(stats.stored_bytes)}`], ["loaded", `${count(stats.loaded)} blocks, ${size(stats.loaded_bytes)}`],
      ["evicted", `${count(stats.evicted)} blocks`], ...(state?.flush ? [["flush", flushText(state.flush)]] : [])], true),
    wrong.length ? h("h3", {}, "What went wrong, since the start") : null,
    wrong.length ? h("ul", { class: "reasons" }, wrong.map((key) => h("li", {}, h("b", { class: "fault" }, count(stats[key])), ` ${name(key)}: ${meanings[key]?.description ?? ""}`))) : null,
    state ? h("p", { class: "hint" }, `Attached by ${state.source === "settings" ? "the settings" : "an operator, until the next start"}: ${definitionText(state.definition)}.`) : null,
    h("div", { class: "buttons" }, changeButton({ onclick: () => openReset(() => {}, tier) }, `Reset ${tier}…`),
      state ? changeButton({ onclick: () => openFlush(state, refresh) }, state.flush?.state === "running" ? `End the flush of ${tier}…` : `Flush to ${tier}…`) : null,
      state ? changeButton({ onclick: () => openSwitch(state, refresh) }, `${state.enabled ? "Disable" : "Enable"} ${tier}…`) : null,
      state ? changeButton({ onclick: () => openDetachment(state, refresh) }, `Detach ${tier}…`) : null),
    h("details", { open: opened.has(tier), ontoggle: ({ target }) => (target.open ? opened.add(tier) : opened.delete(tier)) },
      h("summary", {}, "All counts", h("span", { class: "hidden" }, ` of ${tier}`)), counts));
}

/** Return how far a flush is, or how it ended. */
function flushText({ state, stored_blocks: stored, num_blocks: all, reason }) {
  return `${state}, ${count(stored)} of ${count(all)} blocks${reason ? `: ${reason}` : ""}`;
}

/** Tiers of which all counts are shown. */
const opened = new Set();

const pathOf = (tier) => `tiers/${encodeURIComponent(tier)}`;
const definitionText = (definition) => Object.entries(definition).filter(([key, given]) => key !== "name" && given !== null)
  .map(([key, given]) => `${key} ${key.endsWith("_bytes") && typeof given === "number" ? size(given) : text(given)}`).join(", ");

/** Return what a tier holds and has served, and its jobs under way, in words. */
function useOf(tier) {
  const { blocks = 0, bytes = 0, open_jobs: jobs = 0, loaded = 0 } = live.stats?.tiers[tier] ?? {};
  return { held: `${count(blocks)} blocks (${size(bytes)})`, jobs: jobs ? count(jobs) : "none", loaded: count(loaded) };
}

function openFlush({ name: tier, flush }, done) {
  const ends = flush?.state === "running";
  openDialog({
    title: ends ? `End the flush of ${tier}` : `Flush the pool to the tier ${tier}`,
    review() {
      return {
        lines: ends ? ["Blocks that were copied stay in the tier.", "Nothing more is copied to it."] :
          ["The pool's blocks are copied to it beside the engine, beginnings of prompts first, as many as have room in it.",
            "They stay in the pool. In lazy mode, blocks that only the device has are not copied."],
        confirm: ends ? "End the flush" : "Flush the pool",
      };
    },
    async apply() {
      if (ends) {
        await remove(`${pathOf(tier)}/flush`);
        return `The flush of ${tier} has ended.`;
      }
      const { num_blocks: blocks } = await post(`${pathOf(tier)}/flush`, {});
      return `${count(blocks)} blocks are copied to ${tier}.`;
    },
    done,
  });
}

function openSwitch({ name: tier, enabled }, done) {
  openDialog({
    title: `${enabled ? "Disable" : "Enable"} the tier ${tier}`,
    review() {
      const { held, jobs, loaded } = useOf(tier);
      return {
        lines: enabled ? ["It gets no new jobs: nothing is stored in it, looked up in it or loaded from it.",
          `Its ${held} stay, and resets still reach it. Jobs under way (${jobs}) end.`,
          `Prompts that its blocks would have served are computed. Since the start it has served ${loaded} blocks.`, UNTIL_RESTART] :
          [`Requests that arrive from now on store blocks in it, and load its ${held}.`,
            "Blocks that were stored in the pool meanwhile are not copied to it."],
        confirm: enabled ? "Disable the tier" : "Enable the tier",
        danger: enabled,
      };
    },
    async apply() {
      await put(pathOf(tier), { enabled: !enabled });
      return `The tier ${tier} is ${enabled ? "disabled" : "enabled"}.`;
    },
    done,
  });
}

function openDetachment({ name: tier, source }, done) {
  openDialog({
    title: `Detach the tier ${tier}`,
    form: [field("Time for its jobs to end, in seconds", h("input", { name: "drain", type: "number", min: 0, max: 60, step: "any", value: String(DRAIN_S), required: true }))],
    names: { drain_timeout_s: "drain" },
    review({ drain }) {
      const { held, jobs } = useOf(tier);
      return {
        lines: [`Jobs under way (${jobs}) have ${seconds(Number(drain))} to end, then they are canceled. Then the tier is closed.`,
          `Its ${held} stay where they are, and no prompt is served from them.`,
          "Resets do not reach them while it is detached. Disable it instead if resets have to.",
          source === "settings" ? "The next start attaches it again, as the settings name it." : "It is not in the settings: it is used again once it is attached again."],
        confirm: "Detach the tier",
        danger: true,
      };
    },
    async apply({ drain }) {
      await remove(`${pathOf(tier)}?drain_timeout_s=${Number(drain)}`);
      return `The tier ${tier} is detached.`;
    },
    done,
  });
}

function definitionOf({ definition }) {
  let body = null;
  try {
    body = JSON.parse(definition);
  } catch (error) {
    throw invalid("definition", `This is not JSON: ${error.message}`);
  }
  if (body === null || typeof body !== "object" || Array.isArray(body) || typeof body.type !== "string" || "enabled" in body) {
    throw invalid("definition", "It must be a JSON object with the fields of a tier, at least its type.");
  }
  return body;
}

function openAttachment(attached, done) {
  openDialog({
    title: "Attach a tier",
    form: [field("Name", h("input", { name: "tier", required: true, autocomplete: "off", spellcheck: "false" }), "Letters, digits, dots, underscores and hyphens."),
      field("Definition, as JSON", h("textarea", { name: "definition", required: true, spellcheck: "false", value: EXAMPLE }), "As an entry of the setting `tiers`. It names files with passwords, and has none itself.")],
    names: { name: "tier", body: "definition" },
    review(values) {
      const tier = values.tier.trim();
      if (!NAME.test(tier)) throw invalid("name", "Up to 64 letters, digits, dots, underscores and hyphens; the first is a letter or a digit.");
      if (attached.some((one) => one.name === tier)) throw invalid("name", "There is a tier of this name: detach that one first, or choose another name.");
      const body = definitionOf(values);
      const limit = typeof body.timeout_s === "number" ? seconds(body.timeout_s) : "its timeout_s";
      return {
        lines: [`The tier ${tier} is opened and tested as at start, in at most ${limit}: ${definitionText(body)}.`,
          attached.length ? `Requests that arrive from then on use it, after ${attached.map((one) => one.name).join(", ")}.` : "Requests that arrive from then on use it.",
          "Blocks that are stored from then on are stored in it, too; those in the pool are not copied to it.",
          "Blocks that it holds already, of the same model and layout, are loaded.", UNTIL_RESTART],
        confirm: "Attach the tier",
      };
    },
    async apply(values) {
      await put(pathOf(values.tier.trim()), definitionOf(values));
      return `The tier ${values.tier.trim()} is attached.`;
    },
    done,
  });
}
