// The dialog that drops blocks.

import { post } from "./api.js";
import { openDialog } from "./dialog.js";
import { field, h, select } from "./dom.js";
import { count, size } from "./format.js";
import { live } from "./live.js";

const MATCHES = { request: "requests", tenant: "tenants", lora: "LoRA adapters", session: "sessions" };

function bodyOf({ place, request, tenant, lora, session, drain, reason }) {
  const match = Object.fromEntries(Object.entries({ request, tenant, lora, session }).map(([name, glob]) => [name, glob.trim()]).filter(([, glob]) => glob));
  const body = { tiers: place === "all" ? null : [place], drain_timeout_s: Number(drain) };
  if (Object.keys(match).length) body.match = match;
  if (reason.trim()) body.reason = reason.trim();
  return body;
}

async function effectOf(values) {
  const { place } = values;
  const body = bodyOf(values);
  const { match } = body;
  const { dropped_blocks: blocks, dropped_bytes: bytes, tiers } = await post("reset?dry_run=true", body);
  const places = place === "all" ? ["host", ...Object.keys(live.stats.tiers)] : [place];
  const held = places.map((name) => {
    if (name === "host") return `the pool (${count(blocks)} blocks, up to ${size(bytes)})`;
    const tier = tiers[name];
    return `${match && tier ? "all of " : ""}the tier ${name} (${tier ? `${count(tier.dropped_blocks)} blocks, ${size(tier.dropped_bytes)}` : "not counted by origin"})`;
  });
  const whose = match ? ` that were stored by ${Object.entries(match).map(([name, glob]) => `${MATCHES[name]} ${glob}`).join(" and ")}` : "";
  return {
    lines: [
      `${match ? "Those blocks" : "All blocks"}${whose} are dropped from ${held.join(" and ")}.`,
      "It cannot be undone, and a restart does not bring them back.",
      "Their prompts are computed again at their next request, so that the hit rate falls until the pool is filled.",
      "Requests that run keep their answers; transfers under way end, and publish nothing.",
    ],
    confirm: match ? "Drop these blocks" : places.length > 1 || place === "all" ? "Drop everything" : `Drop all of ${place === "host" ? "the pool" : place}`,
    danger: true,
  };
}

/** Open the dialog; `place` is `all`, `host`, or the name of a tier. */
export function openReset(done, place = "all") {
  if (live.stats === null) return;
  const tiers = Object.keys(live.stats.tiers);
  const text = (name, hint) => field(hint, h("input", { name, autocomplete: "off", spellcheck: "false" }));
  openDialog({
    title: "Reset: drop blocks",
    form: [
      field("From", select("place", [["all", tiers.length ? "the pool and all tiers" : "the pool"], ...(tiers.length ? [["host", "the pool only"]] : []),
        ...tiers.map((name) => [name, `the tier ${name} only`])], place)),
      h("p", { class: "hint" }, "Globs narrow it to the blocks that such requests stored; without any, everything is dropped."),
      text("request", "Request id, as a glob"),
      text("tenant", "Tenant's digest, as a glob"),
      text("lora", "LoRA adapter, as a glob"),
      text("session", "Session id, as a glob"),
      field("Wait for transfers under way, in seconds", h("input", { name: "drain", type: "number", min: 0, max: 3600, value: "30", required: true })),
      text("reason", "Reason, for the audit"),
    ],
    names: { drain_timeout_s: "drain", tiers: "place" },
    review: effectOf,
    async apply(values) {
      const { dropped_blocks: blocks, dropped_bytes: bytes, tiers: dropped, pending_jobs: pending } = await post("reset", bodyOf(values));
      const others = Object.entries(dropped).map(([name, one]) => `, ${count(one.dropped_blocks)} of ${name}`).join("");
      return `Dropped ${count(blocks)} blocks (${size(bytes)}) of the pool${others}.${pending ? ` ${pending} jobs are still ending.` : ""}`;
    },
    done,
  });
}
