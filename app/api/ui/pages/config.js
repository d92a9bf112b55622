// Configuration: every setting with its value and source; those that may change while the service runs can be changed.

import { get, openapi, patch } from "../api.js";
import { invalid, openDialog } from "../dialog.js";
import { changeButton, field, h, isNarrow, prose, select, table, withChanges } from "../dom.js";
import { count, exactSize, size, value as text } from "../format.js";
import { live } from "../live.js";

export const title = "Configuration";

/** What a change does, beyond the description of the setting. */
const EFFECTS = {
  pool_bytes: poolEffect,
  store_mode: ({ next }) => [next === "auto" ? "Decided now, by the size of the pool." : null, "New blocks are offered in the new mode; blocks in the pool stay."],
  eviction_policy: () => [`The ${count(live.stats.pool.ready)} blocks in the pool stay. Their order of eviction is taken over as far as the new policy can.`],
  load_decision: ({ next }) => [next === "always" ? "Every hit is loaded, also where computing would be faster." :
    "Hits are computed again where that was measured to be faster; `declined` counts them."],
  store_threshold: ({ next }) => [`A block is stored at offer number ${next}; counts begin anew when the pool is resized.`,
    Number(next) > 1 ? "Blocks that are offered less often are not stored." : null],
  max_pinned_fraction: () => ["Existing pins stay, also beyond the new limit; new ones are refused there."],
  eviction_history_rows: trimEffect,
  eviction_history_days: trimEffect,
  auto_pause: ({ next }) => [next ? "Storing pauses once offloading has cost more than it saved for 10 minutes, and is tried again at intervals. Loads go on." :
    "Storing goes on, whatever it costs."],
  log_level: () => ["Only what is logged from now on changes."],
};

function trimEffect({ now, next }) {
  return [Number(next) < now ? "History beyond the new limit is deleted, which cannot be undone." : "More history is kept from now on."];
}

function poolEffect({ now, next }) {
  const bytes = bytesOf(next);
  const { pool } = live.stats;
  const slots = Math.floor(bytes / pool.slot_bytes);
  const lines = [`The pool has ${count(pool.slots)} slots, ${count(pool.ready)} of them with blocks; it would have about ${count(slots)}, rounded down to whole extents, the parts in which its memory is taken.`];
  if (bytes < now) {
    lines.push(`At least ${count(Math.max(0, pool.ready - slots))} blocks are evicted (shrink); slots in use follow once they are free. Pinned blocks in that part prevent it.`);
  } else {
    lines.push(`Up to ${size(bytes - now)} more memory of the host are taken; without that, nothing changes.`);
  }
  return [...lines, "The resize goes on after the answer; the overview shows its progress."];
}

const UNLIMITED = "unlimited";
const UNITS = { KB: 1e3, MB: 1e6, GB: 1e9, TB: 1e12, KiB: 2 ** 10, MiB: 2 ** 20, GiB: 2 ** 30, TiB: 2 ** 40 };

/** Return the bytes of a size as it is entered, or `unlimited`, which some settings may be. */
function bytesOf(given) {
  const entered = text(given).trim();
  if (entered === UNLIMITED) return entered;
  const match = /^([0-9.]+) ?([KMGT]i?B)?$/.exec(entered);
  if (match === null) throw invalid("next", "must be a number of bytes, or a size such as 8GiB");
  return Math.floor(Number(match[1]) * (UNITS[match[2]] ?? 1));
}

/** Return the value of a setting; a short one is not broken. */
function valueOf({ name, value, secret }) {
  const given = secret && value !== null ? "set (hidden)" : shown(name, value);
  return h("b", { class: given.length < 20 ? "value keep" : "value" }, given);
}

const isSize = (name) => name.endsWith("_bytes");
const shown = (name, given) => (isSize(name) && typeof given === "number" ? exactSize(given) : text(given));

export async function show(main, { query, signal, refresh }) {
  const settings = Object.entries(await get("config", {}, signal)).map(([name, one]) => ({ name, ...one }));
  const search = h("input", { name: "search", type: "search", value: query.get("setting") || "", autocomplete: "off" });
  const which = select("which", [["all", "all settings"], ["mutable", "changeable while it runs"], ["set", "not at their default"]], isNarrow() && !query.get("setting") ? "mutable" : "all");
  const list = h("div", {});
  const status = h("p", { class: "hint", role: "status" });
  const columns = withChanges([
    { name: "Setting", keep: true, cell: (one) => [h("b", {}, one.name), h("small", {}, one.variable)] },
    { name: "Value", cell: (one) => [valueOf(one),
      one.in_use && !one.in_use.startsWith(`${one.value} `) ? h("small", {}, `in use: ${one.in_use}`) : null,
      one.shortfall ? h("small", { class: "error" }, one.shortfall) : null] },
    { name: "Source", cell: (one) => [h("span", { class: `source source-${one.source}` }, one.source), one.source === "default" || one.place.startsWith(one.variable) ? null : h("small", {}, one.place)] },
    { name: "Meaning", cell: (one) => prose(one.description) },
  ], { name: "Change", cell: (one) => (one.mutable ? changeButton({ "aria-label": `Change ${one.name}`, onclick: () => openChange(one, refresh) }, "Change…") :
    h("small", {}, "needs a restart")) });
  function filter() {
    const words = search.value.trim().toLowerCase();
    const found = settings.filter((one) => `${one.name} ${one.variable} ${one.description}`.toLowerCase().includes(words) &&
      (which.value === "all" || (which.value === "mutable" ? one.mutable : one.source !== "default")));
    const sections = [...Map.groupBy(found, ({ section }) => section)];
    list.replaceChildren(...sections.flatMap(([section, rows]) => [h("h2", {}, section), table(section, columns, rows)]),
      sections.length ? "" : h("p", { class: "empty" }, "No setting matches."));
    status.textContent = `${found.length} of ${settings.length} settings`;
  }
  search.addEventListener("input", filter);
  which.addEventListener("change", filter);
  main.replaceChildren(h("h1", {}, title),
    h("p", { class: "hint" }, "Changes made here are in force at once and are lost at the next start. To keep one, set its environment variable as well."),
    h("div", { class: "filters" }, field("Search", search), field("Show", which)), status, list);
  filter();
}

async function openChange(setting, done) {
  const body = (await openapi()).paths["/admin/v1/config"].patch.requestBody;
  const { name, value: now } = setting;
  const [schema, ...spellings] = body.content["application/json"].schema.properties[name].anyOf;
  const mayBeUnlimited = spellings.some(({ pattern }) => pattern?.includes(UNLIMITED));
  const isFlag = schema.type === "boolean";
  const choices = isFlag ? ["true", "false"] : schema.enum;
  const control = choices ? select("next", choices.map((one) => [one, one]), text(now)) :
    isSize(name) ? h("input", { name: "next", value: shown(name, now), required: true, autocomplete: "off" }) :
      h("input", { name: "next", type: "number", value: text(now), required: true, min: schema.minimum, max: schema.maximum,
        step: schema.type === "integer" ? 1 : "any" });
  const hint = isSize(name) ? `A size such as 128MiB or 8GiB${mayBeUnlimited ? ", or `unlimited`" : ""}.` : null;
  const isNumber = schema.type === "integer" || schema.type === "number";
  const sent = ({ next, restore }) => (restore ? null : isFlag ? next === "true" : isNumber && /^[0-9.]+$/.test(next.trim()) ? Number(next) : next.trim());
  openDialog({
    title: `Change ${name}`,
    names: { [name]: "next" },
    form: [h("p", {}, prose(setting.description)), field("New value", control, hint),
      setting.source === "runtime" ? h("label", { class: "check" }, h("input", { type: "checkbox", name: "restore" }), " Restore the value at start") : null],
    review(values) {
      const next = sent(values);
      const wanted = isSize(name) && next !== null ? bytesOf(next) : next;
      if (wanted === UNLIMITED && !mayBeUnlimited) throw invalid("next", "must be a size such as 8GiB");
      if (next !== null && text(wanted) === text(now)) throw invalid("next", `${name} has this value already.`);
      const known = next === null ? ["The value that it had at start is in force again."] : EFFECTS[name]?.({ now, next }) ?? [];
      return {
        lines: [next === null ? `${name}: ${shown(name, now)} is given up` : `${name}: ${shown(name, now)} becomes ${shown(name, wanted)}`,
          ...known, "It is in force at once, and lost at the next start."],
        confirm: `Change ${name}`,
        danger: name === "pool_bytes" && next !== null && wanted < now,
      };
    },
    async apply(values) {
      const changed = await patch("config", { [name]: sent(values) });
      return `${name} is ${shown(name, changed[name].value)}.`;
    },
    done,
  });
}
