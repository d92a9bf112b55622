// Policy fields in forms and tables, with the types and descriptions of the API.

import { openapi } from "./api.js";
import { invalid } from "./dialog.js";
import { field, h, prose, select, table } from "./dom.js";
import { value as text } from "./format.js";

const UNSET = "";

/** Return the value of a policy field in words. */
const shown = (name, given) => (name === "tiers" && given === null ? "all" : text(given));

/** Return the policy fields: [{name, description, kind, choices}]. */
export async function policyFields(signal) {
  const { properties } = (await openapi(signal)).components.schemas.PolicyBody;
  return Object.entries(properties).map(([name, schema]) => {
    const types = schema.anyOf.filter((one) => one.type !== "null");
    const choices = types[0].type === "boolean" ? ["true", "false"] : types[0].enum;
    const kind = choices ? types[0].type : types[0].type === "array" ? "names" : types[0].type === "number" ? "number" : types[0].pattern ? "text" : "cap";
    return { name, description: schema.description, kind, choices };
  });
}

/** Return form controls for policy fields; `given` holds the values that are set here, `policy` those in force. */
export function policyControls(fields, given, policy = null) {
  return fields.map(({ name, description, kind, choices }) => {
    const now = name in given ? text(given[name]) : UNSET;
    const inForce = policy ? ` In force: ${shown(name, policy[name].value)}, from ${policy[name].source}.` : "";
    if (choices) {
      return field(name, select(name, [[UNSET, "not set here"], ...choices.map((one) => [one, one])], now), `${description}.${inForce}`);
    }
    const hint = { cap: "A number of tokens, or unlimited; empty", names: "Names separated by commas; empty", number: "A number; empty", text: "Empty" }[kind];
    return field(name, h("input", { name, value: now, autocomplete: "off" }), `${description}. ${hint}: not set here.${inForce}`);
  });
}

/** Return the policy fields set in a form, as the API takes them. */
export function policyOf(fields, values) {
  const policy = {};
  for (const { name, kind } of fields) {
    const given = (values[name] || "").trim();
    if (given === UNSET) continue;
    if (kind === "boolean") policy[name] = given === "true";
    else if (kind === "names") policy[name] = given.split(",").map((one) => one.trim()).filter(Boolean);
    else if (kind === "cap" && given !== "unlimited") {
      if (!/^\d+$/.test(given)) throw invalid(name, `${name}: must be a whole number, or unlimited`);
      policy[name] = Number(given);
    } else if (kind === "number") {
      if (!/^\d+(\.\d+)?$/.test(given)) throw invalid(name, `${name}: must be a number`);
      policy[name] = Number(given);
    } else policy[name] = given;
  }
  return policy;
}

/** Return a table of an effective policy: value, source, meaning. */
export function policyTable(fields, policy) {
  return table("Policy by field", [
    { name: "Field", keep: true, cell: (one) => h("code", {}, one.name) },
    { name: "Value", keep: true, cell: (one) => h("b", {}, shown(one.name, policy[one.name].value)) },
    { name: "Source", cell: (one) => source(policy[one.name].source) },
    { name: "Meaning", cell: (one) => prose(one.description) },
  ], fields);
}

/** Return the name of a source; rules and defaults link to where they are set. */
export function source(name) {
  const kind = name.split(":")[0];
  const target = { rule: "#/policies", runtime: "#/policies" }[kind];
  const label = h("span", { class: `source source-${kind}` }, name);
  return target ? h("a", { href: target }, label) : label;
}

/** Return a line per field that changes: the policy now, and what it would be. */
export function changesOf(policy, next) {
  return Object.entries(next)
    .filter(([name, given]) => shown(name, policy[name].value) !== shown(name, given))
    .map(([name, given]) => `${name}: ${shown(name, policy[name].value)} (from ${policy[name].source}) becomes ${shown(name, given)}`);
}

export const WHEN = "It applies to blocks not offered yet, from the engine's next step. Blocks that are stored stay stored.";
