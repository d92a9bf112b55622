// Audit: every call that changed something, or was refused.

import { get } from "../api.js";
import { h, pagedTable } from "../dom.js";
import { moment } from "../format.js";

export const title = "Audit";

export async function show(main, { signal }) {
  const pages = pagedTable("Calls that change something, newest first", [
    { name: "Time", keep: true, cell: (one) => moment(one.time) },
    { name: "Outcome", cell: (one) => h("span", { class: `outcome outcome-${one.outcome ?? "open"}` }, one.outcome ?? "under way", one.status ? ` (${one.status})` : "") },
    { name: "Call", cell: (one) => h("code", {}, `${one.method} ${one.path}`) },
    { name: "With", cell: (one) => (one.what === null ? "–" : h("code", {}, JSON.stringify(one.what))) },
    { name: "Token", cell: (one) => one.token },
    { name: "From", keep: true, cell: (one) => one.client },
    { name: "Call's id", cell: (one) => h("code", {}, one.request_id) },
  ], (cursor) => get("audit", { limit: 100, cursor }, signal), "Nothing was changed yet.");
  await pages.first;
  main.replaceChildren(h("h1", {}, title), h("p", { class: "hint" }, "Every call that changed something, or was refused, newest first."), pages.element);
}
