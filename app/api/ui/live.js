// The stream of stats, which is opened again whenever it ends, and the readiness of the service.

import { ADMIN, after, forgetFixed, send } from "./api.js";

const FIRST_RETRY_S = 0.5;
const LAST_RETRY_S = 8;
const SILENCE_S = 20;
const HEALTH_S = 3;
const HEALTH_LIMIT_S = 10;

/** Events: `stats`, `health`, `connection`, and `restored` after a connection was lost. */
class Live extends EventTarget {
  stats = null;
  health = null;
  connection = { live: false, text: "connecting" };
  #running = false;
  #signal = null;

  /** Call `listener` now, if there is a value, and at each event until `signal` is aborted. */
  on(type, signal, listener) {
    this.addEventListener(type, () => listener(this[type]), { signal });
    if (this[type]) listener(this[type]);
  }

  start() {
    this.stop();
    this.#running = true;
    this.#signal = new AbortController();
    this.#follow(this.#signal.signal);
    this.#watchHealth(this.#signal.signal);
  }

  stop() {
    this.#signal?.abort();
    this.#running = false;
  }

  #set(type, value) {
    this[type] = value;
    this.dispatchEvent(new Event(type));
  }

  async #follow(stopped) {
    let retryS = FIRST_RETRY_S;
    let wasLost = false;
    while (this.#running && !stopped.aborted) {
      let reason = "the stream ended";
      try {
        for await (const stats of events(stopped)) {
          retryS = FIRST_RETRY_S;
          const isOther = this.stats !== null && stats.uptime_s < this.stats.uptime_s;
          this.stats = stats;
          if (isOther) forgetFixed();
          if (!this.connection.live) this.#set("connection", { live: true, text: "live" });
          if (wasLost) this.dispatchEvent(new Event("restored"));
          wasLost = false;
          this.dispatchEvent(new Event("stats"));
        }
      } catch (error) {
        if (stopped.aborted || error.status === 401) return;
        reason = error.status === 0 ? "no connection" : error.message;
      }
      wasLost = true;
      this.#set("connection", { live: false, text: `${reason}, trying again in ${retryS} s` });
      await pause(retryS);
      retryS = Math.min(LAST_RETRY_S, 2 * retryS);
    }
  }

  async #watchHealth(stopped) {
    while (!stopped.aborted) {
      try {
        const response = await send("GET", "readyz", { signal: stopped, limit: after(HEALTH_LIMIT_S), accepted: [503] });
        this.#set("health", await response.json());
      } catch {
        if (stopped.aborted) return;
        this.#set("health", { ready: false, unreachable: true, reasons: ["The service cannot be reached."], degraded: [] });
      }
      await pause(HEALTH_S);
    }
  }
}

export const live = new Live();

const pause = (seconds) => new Promise((done) => setTimeout(done, seconds * 1000));

/** Yield the data of each event. Ends the stream if nothing arrives for long, as after the loss of a network. */
async function* events(stopped) {
  const silent = new AbortController();
  const abort = () => silent.abort();
  stopped.addEventListener("abort", abort);
  let timer = setTimeout(abort, SILENCE_S * 1000);
  try {
    const response = await send("GET", `${ADMIN}stats/stream`, { query: { interval_s: 1 }, signal: silent.signal });
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(abort, SILENCE_S * 1000);
      const lines = (rest + value).split(/\r\n|\n|\r/);
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data:")) yield JSON.parse(line.slice(5));
    }
  } catch (error) {
    if (silent.signal.aborted && !stopped.aborted) throw new Error("nothing received");
    if (error instanceof TypeError) throw new Error("the connection was lost");
    throw error;
  } finally {
    clearTimeout(timer);
    stopped.removeEventListener("abort", abort);
    abort();
  }
}
