// Requests: live and recent ones, and one of them with its policy and why it missed.

import { causeTexts, get, put, remove } from "../api.js";
import { openDialog } from "../dialog.js";
import { card, changeButton, every, facts, field, firstRows, h, pagedTable, requestLink, select, shareBar } from "../dom.js";
import { count, moment, name, percent, seconds, value as text } from "../format.js";
import { WHEN, changesOf, policyControls, policyFields, policyOf, policyTable, source } from "../policy_form.js";

export const title = "Requests";

const STATES = ["waiting", "loading", "running", "finished"];
const DEFAULT_TTL_S = 3600;
/** The policy field that makes blocks not stored for this reason. */
const POLICY_OF_SKIP = { prompt_only: "offload_prompt_only", token_cap: "max_offload_tokens", disabled: "store" };
const REFRESH_S = 3;

export function show(main, context) {
  return context.parts.length ? showOne(main, context) : showList(main, context);
}

const pathOf = (id, suffix = "") => `requests/${encodeURIComponent(id)}${suffix}`;
const tierHits = (tokens) => Object.values(tokens.tier_hit).reduce((sum, hits) => sum + hits, 0);

/** Return what a request missed: [{part, cause, number, text, short}], largest first. */
function missesOf(missed, texts) {
  const rows = Object.entries(missed).flatMap(([part, found]) => Object.entries(found)
    .filter(([, number]) => number)
    .map(([cause, number]) => ({ part, cause, number, text: texts[part]?.[cause] ?? name(cause), short: texts.short[part]?.[cause] ?? name(cause) })));
  return rows.sort((one, other) => other.number - one.number);
}

/** Return the largest miss in a few words; what is always computed is no reason to act. */
function mainMiss(miss) {
  return miss ? h("span", { class: miss.cause === "tail" ? "hint" : null, title: miss.text }, miss.short) : "–";
}

async function showList(main, { query, signal }) {
  const texts = await causeTexts(signal);
  const state = query.get("state") || "";
  const list = h("div", {});
  const automatic = h("input", { type: "checkbox", checked: true, id: "automatic" });
  const filter = select("state", [["", "all states"], ...STATES.map((each) => [each, each])], state);
  const missed = h("input", { type: "checkbox", checked: query.get("missed") === "true", id: "missed" });
  const tenant = h("input", { name: "tenant", value: query.get("tenant") || "", autocomplete: "off", spellcheck: "false" });
  const session = h("input", { name: "session", value: query.get("session") || "", autocomplete: "off", spellcheck: "false" });
  const applyFilters = () => {
    const wanted = new URLSearchParams();
    if (session.value.trim()) wanted.set("session", session.value.trim());
    if (tenant.value.trim()) wanted.set("tenant", tenant.value.trim());
    if (filter.value) wanted.set("state", filter.value);
    if (missed.checked) wanted.set("missed", "true");
    location.hash = `#/requests${wanted.size ? `?${wanted}` : ""}`;
  };
  for (const each of [filter, missed, tenant, session]) each.addEventListener("change", applyFilters);
  const wanted = h("input", { name: "id", autocomplete: "off", spellcheck: "false", required: true });
  const search = h("form", { class: "filters", onsubmit: (event) => {
    event.preventDefault();
    location.hash = `#/requests/${encodeURIComponent(wanted.value.trim())}`;
  } }, field("Request id", wanted), h("button", {}, "Open"));
  main.replaceChildren(h("h1", {}, title), h("div", { class: "filter-row" },
    h("div", { class: "filters" }, field("State", filter), field("Tenant's digest", tenant), field("Session, or a glob", session)), search,
    h("label", { class: "check", for: "missed" }, missed, " Only those that missed whole blocks"),
    h("label", { class: "check", for: "automatic" }, automatic, " Refresh automatically")),
  h("p", { class: "hint" }, "Prompt tokens of each request, by what served them: the device, loads from pool and tiers, or computing."), list);
  const columns = [
    { name: "Request", cell: (one) => requestLink(one.id) },
    { name: "Arrived", keep: true, cell: (one) => moment(one.arrived_at) },
    { name: "State", cell: (one) => h("span", { class: `state state-${one.state}` }, one.state) },
    { name: "Prompt", number: true, cell: (one) => count(one.num_prompt_tokens) },
    { name: "Device", number: true, cell: ({ prompt_tokens: tokens }) => count(tokens.device_hit) },
    { name: "Loaded", number: true, cell: ({ prompt_tokens: tokens }) => count(tokens.host_hit + tierHits(tokens)) },
    { name: "Computed", number: true, cell: ({ prompt_tokens: tokens }) => count(tokens.recomputed) },
    { name: "First token", number: true, cell: (one) => seconds(one.first_token_s) },
    { name: "Mostly because", cell: (one) => mainMiss(missesOf(one.missed_tokens, texts)[0]) },
  ];
  async function load() {
    const pages = pagedTable("Requests, newest first", columns,
      (cursor) => get("requests", { state, tenant: tenant.value.trim(), session: session.value.trim(), missed: missed.checked ? "true" : "", limit: firstRows(), cursor }, signal), "No requests.");
    await pages.first;
    list.replaceChildren(pages.element);
  }
  await load();
  every(REFRESH_S, signal, async () => {
    // What is being read or used stays; so do pages that were loaded on demand.
    const isUsed = list.contains(document.activeElement) || list.matches(":hover") || list.querySelectorAll("tbody tr").length > firstRows();
    if (automatic.checked && !isUsed && !document.hidden) await load();
  });
}

async function showOne(main, { parts, signal, refresh }) {
  const id = parts[0];
  let request;
  try {
    request = await get(pathOf(id), {}, signal);
  } catch (error) {
    if (error.status !== 404) throw error;
    request = null;
  }
  const fields = await policyFields(signal);
  const back = h("p", {}, h("a", { href: "#/requests" }, "All requests"));
  if (request === null) {
    const add = changeButton({ onclick: async () => openOverride(id, null, await defaultPolicy(), fields, refresh) }, "Override its policy…");
    main.replaceChildren(back, h("h1", {}, id), h("p", {}, "This request is not known: it has not arrived, or it finished more than 1,000 requests ago."),
      h("p", { class: "hint" }, "An override can be set before a request arrives."), ...[add].filter(Boolean));
    return;
  }
  const texts = await causeTexts(signal);
  const { override } = request;
  const buttons = h("div", { class: "buttons" },
    changeButton({ onclick: () => openOverride(id, override, request.policy, fields, refresh) },
      override ? "Change the override…" : "Override its policy…"),
    override ? changeButton({ onclick: () => openRemoval(id, override, refresh) }, "Remove the override…") : null);
  const cards = [errorCard(request), servedCard(request), missedCard(request, texts), storedCard(request), leaseCard(request)].filter(Boolean);
  main.replaceChildren(back, h("h1", {}, request.id),
    facts([["state", request.state], ["prompt tokens", count(request.num_prompt_tokens)], ["output tokens", count(request.num_output_tokens)],
      request.tenant ? ["tenant", request.tenant] : null, request.lora ? ["LoRA", request.lora] : null,
      request.session ? ["session", request.session] : null,
      request.aliases.length ? ["other ids", request.aliases.join(", ")] : null, ...timesOf(request)], true),
    ...cards, card("Policy", override ? h("p", { class: "notice" }, `An override of ${override.fields.join(", ")} holds until ${moment(override.expires_at)}.`) : null,
      policyTable(fields, request.policy), buttons));
  if (request.state === "finished") return;
  every(REFRESH_S, signal, async () => {
    const isUsed = document.activeElement !== main && main.contains(document.activeElement);
    if (!isUsed && !document.hidden && !document.querySelector("dialog")) await refresh();
  });
}

function timesOf({ arrived_at: arrived, wait_s: waitS, tier_wait_s: tierS, load_s: loadS, first_token_s: firstTokenS, finished_at: finished }) {
  const span = (label, value) => (value === null || value === undefined ? null : [label, seconds(value)]);
  return [arrived ? ["arrived", moment(arrived)] : null, span("waited to be scheduled", waitS),
    span("of that, for tiers", tierS), loadS ? span("waited for loads", loadS) : null, span("first token after", firstTokenS), finished ? ["finished", moment(finished)] : null];
}

function errorCard({ error }) {
  return error ? card("Computed without offloading", h("p", { class: "notice" }, `After an unexpected error (${error}); the log has the traceback.`)) : null;
}

function servedCard({ prompt_tokens: tokens }) {
  if (!tokens.total) return card("What served its prompt", h("p", {}, "Its prompt is not computed yet, so nothing is counted."));
  const parts = [["device", tokens.device_hit, "on the device"], ["host", tokens.host_hit, "from the pool"],
    ...Object.entries(tokens.tier_hit).map(([tier, hits]) => ["tier", hits, `from the tier ${tier}`]),
    ["computed", tokens.recomputed, "computed"]];
  return card("What served its prompt", shareBar(parts), h("ul", { class: "legend" }, parts.map(([kind, number, text]) =>
    h("li", {}, h("i", { class: kind }), `${text}: ${count(number)} tokens, ${percent(number, tokens.total)}`))));
}

function missedCard({ missed_tokens: missed, evicted_between: between, policy, prefix, num_prompt_tokens: length, shortest_hit_tokens: shortest }, texts) {
  const rows = missesOf(missed, texts);
  if (!rows.length) return null;
  const link = between ? h("p", {}, h("a", { href: `#/evictions?since=${encodeURIComponent(between[0])}&until=${encodeURIComponent(between[1])}` },
    "Evictions of its blocks")) : null;
  return card("Why the rest was computed", policy.load.value ? null : h("p", { class: "notice" }, "Its policy forbids loads, whatever the pool and tiers hold: load is false, from ", source(policy.load.source), "."),
    prefix ? h("p", {}, prefix.text) : null, length < shortest ? h("p", {}, `No prompt of fewer than ${count(shortest)} tokens can hit.`) : null,
    h("p", { class: "hint" }, "These prompt tokens were computed because they were"),
    h("ul", { class: "reasons" }, rows.map((row) => h("li", {}, h("b", {}, `${count(row.number)} ${row.number === 1 ? "token" : "tokens"}:`), ` ${row.text}`))), link);
}

function storedCard({ store, policy }) {
  if (!store.offered) return card("What was stored of it", h("p", {}, "No block of it was considered for storing."));
  const skipped = Object.entries(store.skipped).filter(([, number]) => number);
  return card("What was stored of it", facts([["blocks considered", count(store.offered)], ["stored", count(store.stored)],
    store.in_flight ? ["being stored", count(store.in_flight)] : null, store.failed ? ["failed; see the log", count(store.failed)] : null,
    ...skipped.map(([reason, number]) => [`not: ${name(reason)}`, [count(number), sourceOfSkip(reason, policy)]])]));
}

function leaseCard({ lease }) {
  if (!lease) return null;
  return card("What its lease keeps", facts([["outcome", lease.outcome], ["blocks", count(lease.blocks)],
    lease.pending ? ["of these, to be stored", count(lease.pending)] : null, lease.until ? ["until", moment(lease.until)] : null,
    lease.reason ? ["because", lease.reason] : null]));
}

function sourceOfSkip(reason, policy) {
  const view = policy[POLICY_OF_SKIP[reason]];
  return view ? [` (${POLICY_OF_SKIP[reason]} is ${text(view.value)}, from `, source(view.source), ")"] : null;
}

const defaultPolicy = () => get("policy");

function openOverride(id, override, policy, fields, done) {
  const given = Object.fromEntries((override?.fields ?? []).map((each) => [each, policy[each].value]));
  openDialog({
    title: `Override the policy of ${id}`,
    form: [...policyControls(fields, given, policy),
      field("Expires after, in seconds", h("input", { name: "ttl_s", type: "number", min: 1, step: "any", value: String(DEFAULT_TTL_S), required: true }))],
    review(values) {
      const next = policyOf(fields, values);
      if (!Object.keys(next).length) throw new Error("Set at least one field.");
      const changes = changesOf(policy, next);
      const dropped = (override?.fields ?? []).filter((each) => !(each in next));
      return {
        lines: [...(changes.length ? changes : ["No value differs from the policy in force; rules and defaults no longer change these fields for this request."]),
          dropped.length ? `The earlier override of ${dropped.join(", ")} ends.` : null, WHEN,
          `It covers every request that this id names, survives a restart, and ends in ${seconds(Number(values.ttl_s))}.`],
        confirm: "Set the override",
      };
    },
    async apply(values) {
      await put(pathOf(id, "/policy"), { ...policyOf(fields, values), ttl_s: Number(values.ttl_s) });
      return `The override of ${id} is set.`;
    },
    done,
  });
}

function openRemoval(id, override, done) {
  openDialog({
    title: `Remove the override of ${id}`,
    review: () => ({
      lines: [`${override.fields.join(", ")} ${override.fields.length === 1 ? "comes" : "come"} from the request, rules and defaults again.`, WHEN], confirm: "Remove the override", danger: true,
    }),
    async apply() {
      await remove(pathOf(id, "/policy"));
      return `The override of ${id} is removed.`;
    },
    done,
  });
}
