// Audit: every call that changed something, or was refused.

import { get } from "../api.js";
import { firstRows, h, pagedTable } from "../dom.js";
import { dated, moment } from "../format.js";

export const title = "Audit";

function outcomeOf({ outcome, status, path }) {
  const isDryRun = path.endsWith("?dry_run=true") && outcome === "applied";
  return h("span", { class: `outcome outcome-${isDryRun ? "dry-run" : outcome ?? "open"}` }, isDryRun ? "dry run" : outcome ?? "under way", status ? ` (${status})` : "");
}

export async function show(main, { signal }) {
  const hint = h("p", { class: "hint" });
  const pages = pagedTable("Calls that change something, newest first", [
    { name: "Time", keep: true, cell: (one) => dated(one.time) },
    { name: "Outcome", cell: outcomeOf },
    { name: "Call", cell: (one) => h("code", {}, `${one.method} ${one.path}`) },
    { name: "With", cell: (one) => (one.what === null ? "–" : h("code", {}, JSON.stringify(one.what))) },
    { name: "Token", keep: true, cell: (one) => one.token },
    { name: "From", keep: true, cell: (one) => one.client },
    { name: "Call's id", cell: (one) => h("code", {}, one.request_id) },
  ], async (cursor) => {
    const page = await get("audit", { limit: firstRows(), cursor }, signal);
    hint.textContent = page.logged_only
      ? `${page.logged_only} records since ${moment(page.logged_only_since)} are in the log only, as the database did not accept them.`
      : "Every call that changed something, or was refused, newest first.";
    return page;
  }, "No calls are in the database.");
  await pages.first;
  main.replaceChildren(h("h1", {}, title), hint, pages.element);
}
