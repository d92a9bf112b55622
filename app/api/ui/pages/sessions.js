// Sessions: the latest ones that clients named, and what served the prompts of their requests.

import { get } from "../api.js";
import { every, firstRows, h, pagedTable } from "../dom.js";
import { count, moment, percent, shortName } from "../format.js";

export const title = "Sessions";

const REFRESH_S = 5;
const tierHits = (tokens) => Object.values(tokens.tier_hit).reduce((sum, hits) => sum + hits, 0);
const share = (part, { prompt_tokens: tokens }) => percent(part(tokens), tokens.total);

const COLUMNS = [
  { name: "Session", cell: ({ id }) => h("a", { href: `#/requests?session=${encodeURIComponent(id)}`, title: id }, shortName(id)) },
  { name: "Tenant", keep: true, cell: ({ tenant }) => (tenant ? h("code", {}, tenant) : "–") },
  { name: "Requests", number: true, cell: (one) => count(one.requests) },
  { name: "Last seen", keep: true, cell: (one) => moment(one.last_seen) },
  { name: "Prompt tokens", number: true, cell: (one) => count(one.prompt_tokens.total) },
  { name: "From device", number: true, cell: (one) => share((tokens) => tokens.device_hit, one) },
  { name: "From pool", number: true, cell: (one) => share((tokens) => tokens.host_hit, one) },
  { name: "From tiers", number: true, cell: (one) => share(tierHits, one) },
  { name: "Retained until", keep: true, cell: (one) => moment(one.retained_until) },
];

export async function show(main, { signal }) {
  const list = h("div", {});
  const load = async () => {
    const pages = pagedTable("Sessions, the latest first", COLUMNS, (cursor) => get("sessions", { limit: firstRows(), cursor }, signal),
      "No session since the start: clients name one by session_id or the header X-Session-ID.");
    await pages.first;
    list.replaceChildren(pages.element);
  };
  await load();
  main.replaceChildren(h("h1", {}, title),
    h("p", { class: "hint" }, "The last 1,000 sessions that had a request. ", h("code", {}, "kvferry sessions"), " shows where the blocks of one are, keeps them from eviction for a time, and releases them."), list);
  every(REFRESH_S, signal, async () => {
    const isUsed = list.contains(document.activeElement) || list.matches(":hover") || list.querySelectorAll("tbody tr").length > firstRows();
    if (!isUsed && !document.hidden) await load();
  });
}
