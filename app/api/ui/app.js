// The frame of the dashboard: sign-in, navigation, state of the connection, and the page of the address.

import { get, keepToken, keptToken, signIn } from "./api.js";
import { announce, h } from "./dom.js";
import { seconds } from "./format.js";
import { live } from "./live.js";
import * as audit from "./pages/audit.js";
import * as breaks from "./pages/breaks.js";
import * as config from "./pages/config.js";
import * as evictions from "./pages/evictions.js";
import * as overview from "./pages/overview.js";
import * as policies from "./pages/policies.js";
import * as pool from "./pages/pool.js";
import * as requests from "./pages/requests.js";
import * as sessions from "./pages/sessions.js";
import * as tiers from "./pages/tiers.js";
import * as whatIf from "./pages/what_if.js";

/** Pages in the order of use: what happens, what is held, why, what would be, and what can be changed. */
const PAGES = { overview, requests, sessions, pool, tiers, evictions, breaks, "what-if": whatIf, policies, config, audit };
const byId = (id) => document.getElementById(id);
let leaving = new AbortController();
let shownName = null;
const LOADING_MS = 300;

/** Read the page, the parts of its path, and its query from the address. */
function address() {
  const [path, query] = location.hash.replace(/^#\/?/, "").split("?");
  let decoded;
  try {
    decoded = path.split("/").map(decodeURIComponent);
  } catch {
    decoded = [];
  }
  const [page, ...parts] = decoded;
  const name = Object.hasOwn(PAGES, page) ? page : "overview";
  return { name, parts, query: new URLSearchParams(query || "") };
}

async function show(focus = true) {
  const { name, parts, query } = address();
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const page = PAGES[name];
  document.title = `${page.title} - kvferry`;
  for (const link of byId("nav").querySelectorAll("a")) {
    if (link.dataset.page === name) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  const main = byId("main");
  const before = main.firstElementChild;
  const loading = setTimeout(() => {
    main.setAttribute("aria-busy", "true");
    // A page that is shown again keeps what it has, and so does one that has begun to show itself.
    if (shownName !== name && main.firstElementChild === before) main.replaceChildren(h("h1", {}, page.title), h("p", { class: "hint", role: "status" }, "Loading…"));
  }, LOADING_MS);
  signal.addEventListener("abort", () => clearTimeout(loading));
  try {
    await page.show(main, { parts, query, signal, refresh: () => show(false) });
    if (signal.aborted) return;
    if (shownName !== name) window.scrollTo(0, 0);
    shownName = name;
    if (focus) main.focus({ preventScroll: true });
  } catch (error) {
    if (signal.aborted) return;
    const retry = h("button", { type: "button", onclick: () => show() }, "Try again");
    main.replaceChildren(h("h1", {}, page.title), h("p", { class: "error", role: "alert" }, error.message), retry);
    shownName = name;
  } finally {
    clearTimeout(loading);
    if (!signal.aborted) main.removeAttribute("aria-busy");
  }
}

function showConnection({ live: isLive, text }) {
  byId("connection").textContent = text;
  byId("connection").className = `badge ${isLive ? "good" : "bad"}`;
}

function showHealth({ ready, unreachable, degraded }) {
  const [text, kind] = unreachable ? ["unreachable", "bad"] : !ready ? ["not ready", "bad"] :
    degraded.length ? ["degraded", "warn"] : ["ready", "good"];
  byId("health").textContent = text;
  byId("health").className = `badge ${kind}`;
}

function showEngine({ engine, uptime_s: uptimeS }) {
  const served = engine.name === "none" ? "no engine" : `${engine.name}, ${engine.model} on ${engine.device}`;
  byId("engine").textContent = `${served}, up ${seconds(uptimeS)}`;
}

function askForToken(text = "", forget = true) {
  signIn("", () => {});
  if (forget) keepToken("");
  live.stop();
  leaving.abort();
  // A dialog would keep the form from the keyboard, and its call from the new token.
  for (const dialog of document.querySelectorAll("dialog")) dialog.close();
  byId("board").hidden = true;
  byId("sign-in").hidden = false;
  byId("sign-in-error").textContent = text;
  byId("token").value = "";
  byId("token").focus();
}

/** Begin with this token; without one, the service says whether it needs one. */
async function start(token) {
  if (!/^[\x20-\x7e]*$/.test(token)) return askForToken("A token consists of printable ASCII characters.");
  signIn(token, () => {});
  let reads = false;
  try {
    reads = !(await get("token")).may_change;
  } catch (error) {
    if (error.status === 401) return askForToken(token ? "This token is not known here." : "");
    // Not for ever: a service that is starting answers 503.
    if (error.status) return askForToken(error.message, false);
  }
  signIn(token, () => askForToken(token ? "The service does not know the token any more." : "The service needs a token now."), reads);
  keepToken(token);
  byId("reads").hidden = !reads;
  byId("sign-out").hidden = !token;
  byId("sign-in").hidden = true;
  byId("board").hidden = false;
  live.start();
  return show(false);
}

function begin() {
  byId("loading").hidden = true;
  byId("nav").append(h("ul", {}, Object.entries(PAGES).map(([name, page]) =>
    h("li", {}, h("a", { href: `#/${name}`, "data-page": name }, page.label ?? page.title)))));
  // The same address again shows the page anew.
  byId("nav").addEventListener("click", ({ target }) => { if (target.href === location.href) show(); });
  byId("skip").addEventListener("click", (event) => {
    event.preventDefault();
    byId("main").focus();
  });
  byId("sign-out").addEventListener("click", () => askForToken());
  byId("sign-in").querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    start(byId("token").value.trim());
  });
  window.addEventListener("hashchange", () => { if (!byId("board").hidden) show(); });
  // A hidden tab holds none of the few connections that browsers allow to a host.
  document.addEventListener("visibilitychange", () => {
    if (byId("board").hidden) return;
    if (document.hidden) live.stop();
    else live.start();
  });
  const { signal } = new AbortController();
  live.on("connection", signal, showConnection);
  live.on("health", signal, showHealth);
  live.on("stats", signal, showEngine);
  live.addEventListener("restored", () => {
    announce("Connected again.");
    if (!document.querySelector("dialog[open]")) show(false);
  });
  start(keptToken());
}

begin();
