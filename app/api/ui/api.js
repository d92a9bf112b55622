// Calls of the admin API. The token is kept for the tab, in its session storage, where /docs finds it too.

const ROOT = new URL("../", document.baseURI);
export const ADMIN = "admin/v1/";
/** Longest wait for an answer to GET: a connection whose other end has stopped or was cut off reports no error. */
export const ANSWER_S = 20;
let token = "";
let isReader = false;
let onUnauthorized = () => {};

const KEPT = "kvferry-token";

/** Return the token of an earlier sign-in in this tab, or an empty text, also where the browser forbids storage. */
export function keptToken() {
  try {
    return sessionStorage.getItem(KEPT) ?? "";
  } catch {
    return "";
  }
}

/** Keep a token for the next load of the page in this tab; an empty text forgets it. */
export function keepToken(given) {
  try {
    if (given) sessionStorage.setItem(KEPT, given);
    else sessionStorage.removeItem(KEPT);
  } catch {
    // Without storage the next load of the page asks again.
  }
}

export function signIn(given, unauthorized, reads = false) {
  token = given;
  isReader = reads;
  onUnauthorized = unauthorized;
}

/** Whether the token allows changes. */
export const mayChange = () => !isReader;

/** A response that is an error, or none at all (status 0). */
export class Refused extends Error {
  constructor(status, message, fields = []) {
    super(message);
    this.status = status;
    this.fields = fields;
  }
}

async function refusal(response) {
  let problem = {};
  try {
    problem = await response.json();
  } catch {
    // Not a problem document: the status has to do.
  }
  const detail = problem.detail || `the server answered ${response.status}`;
  return new Refused(response.status, `${detail[0].toUpperCase()}${detail.slice(1)}${/[.!?]$/.test(detail) ? "" : "."}`, problem.errors || []);
}

/** Return a signal that is aborted after `limitS` seconds. */
export const after = (limitS) => AbortSignal.timeout(limitS * 1000);

/** Wait for a part of a response; raises `Refused` if it does not arrive, unless `signal` was aborted. */
async function received(part, signal, limit) {
  try {
    return await part;
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, limit?.aborted ? `The service has not answered for ${ANSWER_S} seconds.` : "The service cannot be reached.");
  }
}

/**
 * Send a request and return the response; raises `Refused` for every other than those in `accepted`.
 * `signal` is of the caller, that no longer wants the response; `limit` is aborted when it has taken too long.
 */
export async function send(method, path, { body, query = {}, signal, limit, accepted = [] } = {}) {
  const url = new URL(path, ROOT);
  for (const [name, value] of Object.entries(query)) {
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  }
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const unauthorized = onUnauthorized;
  const response = await received(fetch(url, {
    method, headers, body: body === undefined ? undefined : JSON.stringify(body), cache: "no-store",
    signal: AbortSignal.any([signal, limit].filter(Boolean)),
  }), signal, limit);
  if (response.ok || accepted.includes(response.status)) return response;
  const refused = await refusal(response);
  // Not after another sign-in: the token that is not known is an earlier one.
  if (refused.status === 401 && unauthorized === onUnauthorized) unauthorized();
  throw refused;
}

async function json(method, path, options) {
  const limit = method === "GET" ? after(ANSWER_S) : null;
  const response = await send(method, path, { ...options, limit });
  const text = await received(response.text(), options?.signal, limit);
  return text ? JSON.parse(text) : null;
}

export const get = (path, query, signal) => json("GET", ADMIN + path, { query, signal });
export const put = (path, body) => json("PUT", ADMIN + path, { body });
export const post = (path, body) => json("POST", ADMIN + path, { body });
export const patch = (path, body) => json("PATCH", ADMIN + path, { body });
export const remove = (path) => json("DELETE", ADMIN + path);

const once = new Map();

/**
 * Return what does not change while the service runs: loaded once, and again after a failure.
 * Rejects if the caller's `signal` was aborted meanwhile.
 */
export async function fixed(path, signal, load = () => get(path)) {
  if (!once.has(path)) {
    once.set(path, load().catch((error) => {
      once.delete(path);
      throw error;
    }));
  }
  const answer = await once.get(path);
  signal?.throwIfAborted();
  return answer;
}

/** Forget what was loaded once: the service was restarted. */
export const forgetFixed = () => once.clear();

export const openapi = (signal) => fixed("openapi.json", signal, () => json("GET", "openapi.json"));
/** Return the sentences by cause of missed tokens, and `short`, the same in a few words. */
export const causeTexts = (signal) => fixed("stats/causes", signal);
