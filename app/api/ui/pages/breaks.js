// Breaks: spans near the front of prompts that make them miss, although what follows is equal.

import { get } from "../api.js";
import { card, every, facts, h, requestLink } from "../dom.js";
import { compact, count, percent, size } from "../format.js";

export const title = "Breaks";

const REFRESH_S = 10;
const link = (setting) => h("a", { href: `#/config?setting=${setting}` }, setting);

export async function show(main, { signal }) {
  const list = h("div", {});
  const load = async () => {
    const answer = await get("breaks", {}, signal);
    list.replaceChildren(...(answer.items.length ? answer.items.map((one) => cardOf(one, answer)) : [nothing(answer)]));
  };
  await load();
  main.replaceChildren(h("h1", {}, title),
    h("p", { class: "hint" }, "Spans that differ between prompts of the last hour which are equal before and behind, such as a date, an id or tools in another order. What is equal behind a span is computed again, as each block stands for all tokens before it. The most expensive first."),
    list);
  every(REFRESH_S, signal, async () => {
    const isUsed = list.contains(document.activeElement) || list.matches(":hover");
    if (!isUsed && !document.hidden) await load();
  });
}

function nothing({ explained_bytes: kept, computed_tokens: computed }) {
  if (!kept) return h("p", { class: "notice" }, "No token ids are kept: set ", link("explain_bytes"), " to keep those of recent prompts, for example 64 MiB. Prompts are private; only the admin token reads them here.");
  return h("p", {}, `No break in ${compact(computed)} computed prompt tokens; token ids take ${size(kept)}.`);
}

function cardOf(one, { computed_tokens: computed }) {
  const about = one.estimated ? "about " : "";
  const contents = one.texts ? [one.text_before, ...one.texts] : one.token_ids ? [one.token_ids_before, ...one.token_ids].map((ids) => ids.join(" ")) : [];
  return card(one.exact ? `At token ${count(one.position)}` : `In the block of token ${count(one.position)}`, facts([
    ["computed again", `${about}${count(one.tokens)} tokens, ${percent(one.tokens, computed)} of all computed`],
    ["requests", `${about}${count(one.requests)}`],
    ["equal before", `${count(one.shared_tokens)} tokens`],
    ...contents.map((text, at) => [["after", "an earlier one has", "later prompts have"][at], text ? h("code", {}, text) : "nothing"]),
    ["such as", [requestLink(one.examples[0]), " and ", requestLink(one.examples[1])]],
  ]), h("p", {}, one.advice));
}
