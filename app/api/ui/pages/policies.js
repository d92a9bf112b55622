// Policies: the runtime defaults, and rules, which are tried in their order.

import { get, patch, post, put, remove } from "../api.js";
import { invalid, openDialog } from "../dialog.js";
import { card, changeButton, field, h, table, withChanges } from "../dom.js";
import { count, shortName, value as text } from "../format.js";
import { WHEN, changesOf, policyControls, policyFields, policyOf, policyTable } from "../policy_form.js";

export const title = "Policies and rules";
export const label = "Policies";

const SPANS = ["priority", "prompt_tokens"];
const ORDER_STEP = 10;
const RULE_NAME = /^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$/;

export async function show(main, { signal, refresh }) {
  const [policy, rules, fields] = await Promise.all([get("policy", {}, signal), allRules(signal), policyFields(signal)]);
  main.replaceChildren(h("h1", {}, title),
    h("p", { class: "hint" }, "The strongest source that sets a field wins: an override of the request, the request itself, the first rule that matches, runtime defaults, settings."),
    card("Defaults", policyTable(fields, policy),
      h("div", { class: "buttons" }, changeButton({ onclick: () => openDefaults(fields, policy, refresh) }, "Change the defaults…"))),
    card("Rules", h("p", { class: "hint" }, "Tried from the top. Only the first rule that matches a request applies to it."),
      rulesTable(rules, fields, refresh),
      h("div", { class: "buttons" }, changeButton({ onclick: () => openRule(null, rules, fields, refresh) }, "Add a rule…"))));
}

async function allRules(signal) {
  const rules = [];
  let cursor = null;
  do {
    const page = await get("rules", { limit: 1000, cursor }, signal);
    rules.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor);
  return rules;
}

const pathOf = (rule) => `rules/${encodeURIComponent(rule)}`;

function conditions(match) {
  const given = Object.entries(match).filter(([, value]) => value !== null && value !== undefined);
  return given.length ? given.map(([key, value]) => `${key === "request" ? "id" : key.replaceAll("_", " ")} ${SPANS.includes(key) ? spanText(value) : value}`).join(", ") : "every request";
}

function spanText({ min, max }) {
  if (min === max) return String(min);
  return max === null ? `from ${count(min)}` : min === null ? `up to ${count(max)}` : `${count(min)} to ${count(max)}`;
}

const named = (rule) => (rule === null ? "no rule" : rule);

/** Test a change of the rules against recent requests, and return what it would change, in lines. */
async function testLines(change) {
  const { requests, matching, changed, rules, fields, examples } = await post("rules/test", change);
  if (!requests) return ["Tested with no requests: none are known yet."];
  const ids = examples.slice(0, 3).map(shortName);
  return [
    `Tested with the latest ${count(requests)} requests: ${matching ? `it concerns ${count(matching)} of them, such as ${ids.join(", ")}` : "it concerns none of them"}.`,
    ...rules.map(({ now, then, requests: num }) => `${count(num)} would get ${named(then)} instead of ${named(now)}.`),
    matching ? `The policy of ${changed ? count(changed) : "none of them"} would change${fields.length ? ":" : "."}${fields.map(({ field, now, then, requests: num }) =>
      ` ${field} from ${text(now)} to ${text(then)} for ${count(num)}`).join(";")}${fields.length ? "." : ""}` : null,
  ];
}

const given = (policy) => Object.entries(policy).filter(([, value]) => value !== null && value !== undefined);

function rulesTable(rules, fields, refresh) {
  return table("Rules in the order in which they are tried", withChanges([
    { name: "Order", number: true, cell: (rule) => text(rule.order) },
    { name: "Rule", cell: (rule) => h("b", {}, rule.name) },
    { name: "Matches", cell: (rule) => conditions(rule.match) },
    { name: "Sets", cell: (rule) => given(rule.policy).map(([key, value]) => `${key}=${text(value)}`).join(", ") || "nothing: later rules do not apply" },
  ], { name: "Change", cell: (rule) => h("div", { class: "buttons" },
    moveButton(rules, rule, -1, refresh), moveButton(rules, rule, 1, refresh),
    changeButton({ "aria-label": `Edit ${rule.name}`, onclick: () => openRule(rule, rules, fields, refresh) }, "Edit…"),
    changeButton({ "aria-label": `Delete ${rule.name}`, onclick: () => openDeletion(rule, refresh) }, "Delete…")) }), rules, "There are no rules.");
}

function moveButton(rules, rule, step, refresh) {
  const label = step < 0 ? `Move ${rule.name} up` : `Move ${rule.name} down`;
  const neighbor = rules[rules.indexOf(rule) + step];
  return changeButton({ "aria-label": label, disabled: neighbor === undefined,
    onclick: () => openMove(rules, rule, neighbor, step, refresh) }, step < 0 ? "↑" : "↓");
}

function openMove(rules, rule, neighbor, step, done) {
  const order = neighbor.order + Math.sign(step);
  const body = { order, match: matchBody(rule.match), policy: Object.fromEntries(given(rule.policy)) };
  const isBefore = (one, other) => one.order < other.order || (one.order === other.order && one.name < other.name);
  const moved = { name: rule.name, order };
  const passed = rules.filter((one) => one !== rule && isBefore(one, rule) !== isBefore(one, moved)).map((one) => one.name);
  openDialog({
    title: `Move ${rule.name} ${step < 0 ? "up" : "down"}`,
    review: async () => ({
      lines: [`Its order changes from ${rule.order} to ${order}: it is tried ${step < 0 ? "before" : "after"} ${passed.join(", ")}.`,
        "Requests that match both get the policy of the one that is tried first.",
        ...await testLines({ rule: { name: rule.name, ...body } }), WHEN],
      confirm: "Move the rule",
    }),
    async apply() {
      await put(pathOf(rule.name), body);
      return `${rule.name} has the order ${order}.`;
    },
    done,
  });
}

const matchBody = (match) => Object.fromEntries(Object.entries(match).filter(([, value]) => value !== null && value !== undefined));

function openDeletion(rule, done) {
  openDialog({
    title: `Delete the rule ${rule.name}`,
    review: async () => ({
      lines: [`${conditions(rule.match)}: ${given(rule.policy).map(([key]) => key).join(", ") || "the policy"} comes from the next rule that matches, or from the defaults.`,
        ...await testLines({ without: rule.name }), WHEN,
        "It cannot be undone, except by adding the rule again."],
      confirm: "Delete the rule",
      danger: true,
    }),
    async apply() {
      await remove(pathOf(rule.name));
      return `The rule ${rule.name} is deleted.`;
    },
    done,
  });
}

function openDefaults(fields, policy, done) {
  const runtime = Object.fromEntries(fields.filter(({ name }) => policy[name].source === "runtime").map(({ name }) => [name, policy[name].value]));
  const bodyOf = (values) => {
    const next = policyOf(fields, values);
    return { next, removed: Object.keys(runtime).filter((name) => !(name in next)) };
  };
  openDialog({
    title: "Change the default policy",
    form: policyControls(fields, runtime, policy),
    review(values) {
      const { next, removed } = bodyOf(values);
      const lines = [...changesOf(policy, next), ...removed.map((name) => `${name}: the setting is in force again, instead of ${text(runtime[name])}`)];
      if (!lines.length) throw new Error("Nothing changes.");
      return { lines: [...lines, WHEN, "It applies to every request, unless a rule, the request or an override sets the field. It is lost at the next start."], confirm: "Change the defaults" };
    },
    async apply(values) {
      const { next, removed } = bodyOf(values);
      await patch("policy", { ...next, ...Object.fromEntries(removed.map((name) => [name, null])) });
      return "The default policy is changed.";
    },
    done,
  });
}

function openRule(rule, rules, fields, done) {
  const match = rule?.match ?? {};
  const order = rule?.order ?? (rules.at(-1)?.order ?? 0) + ORDER_STEP;
  const input = (name, label, value, hint, attributes = {}) => field(label, h("input", { name, value: value ?? "", autocomplete: "off", spellcheck: "false", ...attributes }), hint);
  const span = (name, label) => h("div", { class: "pair" },
    input(`${name}.min`, `${label} from`, text(match[name]?.min ?? ""), null, { type: "number" }), input(`${name}.max`, `${label} to`, text(match[name]?.max ?? ""), null, { type: "number" }));
  openDialog({
    title: rule ? `Edit the rule ${rule.name}` : "Add a rule",
    form: [rule ? null : input("rule", "Name", "", "Letters, digits, dots, underscores and hyphens.", { required: true }),
      input("order", "Order", String(order), "The lowest is tried first.", { type: "number", required: true }),
      h("fieldset", {}, h("legend", {}, "Matches requests with all of"),
        input("request", "Request id, as a glob", match.request), input("tenant", "Tenant's digest, as a glob", match.tenant),
        input("lora", "LoRA adapter, as a glob", match.lora), input("session", "Session id, as a glob", match.session), span("prompt_tokens", "Prompt tokens"), span("priority", "Priority")),
      h("fieldset", {}, h("legend", {}, "Sets"), policyControls(fields, Object.fromEntries(given(rule?.policy ?? {}))))],
    names: { name: "rule", "match.priority": "priority.min", "match.prompt_tokens": "prompt_tokens.min" },
    async review(values) {
      const body = ruleBody(values, fields);
      if (!rule && !RULE_NAME.test(values.rule.trim())) throw invalid("rule", "Up to 64 letters, digits, dots, underscores and hyphens; the first is a letter or a digit.");
      if (!rule && rules.some(({ name }) => name === values.rule.trim())) throw invalid("rule", "There is a rule of this name: edit that one.");
      const tested = await testLines({ rule: { name: rule?.name ?? values.rule.trim(), ...body } });
      const later = rules.filter((one) => one.name !== rule?.name && one.order > body.order).map((one) => one.name);
      return {
        lines: [`It matches ${conditions(spansOf(body.match))}.`,
          given(body.policy).length ? `For them ${given(body.policy).map(([key, value]) => `${key} is ${text(value)}`).join(", ")}, unless the request or an override sets it.` :
            "It sets nothing, and keeps later rules from applying to them.",
          later.length ? `For them the rules ${later.join(", ")} are not tried any more.` : null, ...tested, WHEN, "It survives a restart."],
        confirm: rule ? "Change the rule" : "Add the rule",
      };
    },
    async apply(values) {
      const body = ruleBody(values, fields);
      if (rule) await put(pathOf(rule.name), body);
      else await post("rules", { name: values.rule.trim(), ...body });
      return `The rule ${rule?.name ?? values.rule.trim()} is ${rule ? "changed" : "added"}.`;
    },
    done,
  });
}

const spansOf = (match) => Object.fromEntries(Object.entries(match).map(([key, value]) =>
  [key, SPANS.includes(key) ? { min: null, max: null, ...value } : value]));

function ruleBody(values, fields) {
  const match = {};
  for (const key of ["request", "tenant", "lora", "session"]) if (values[key].trim()) match[key] = values[key].trim();
  for (const key of SPANS) {
    const ends = ["min", "max"].filter((end) => values[`${key}.${end}`] !== "");
    if (ends.length) match[key] = Object.fromEntries(ends.map((end) => [end, Number(values[`${key}.${end}`])]));
  }
  // `priority` is a condition here and a policy field there: the form of the policy has its own controls.
  return { order: Number(values.order), match, policy: policyOf(fields, values) };
}
