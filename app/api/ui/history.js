// Samples of the counters: the last 15 minutes by the second, or the last hour or day by the minute.

import { get } from "./api.js";

export const QUARTER_S = 900;
export const HOUR_S = 3600;
export const DAY_S = 86400;

/** Rows of `stats/history`, kept up to date by loading those that are missing. */
export class Samples {
  rows = [];
  /** Starts of the process and changes by operators: [{timeS, kind, text}]. */
  marks = [];
  #columns = new Map();
  #windowS;

  constructor(windowS) {
    this.#windowS = windowS;
  }

  /** Load the rows since the last one; all of them the first time, and after the clock was set back. */
  async update(signal) {
    const last = this.rows.at(-1);
    const missingS = last === undefined ? this.#windowS : Math.ceil(performance.now() / 1000 - last.receivedS) + 2;
    const windowS = this.#windowS > QUARTER_S ? this.#windowS : Math.min(this.#windowS, missingS);
    const found = await get("stats/history", { window_s: windowS }, signal);
    this.#columns = new Map(found.columns.map((column, index) => [column, index]));
    const spanAt = this.#columns.get("span_s");
    const marks = found.marks.map(({ time, kind, text }) => ({ timeS: Date.parse(time) / 1000, kind, text }));
    const known = windowS === this.#windowS ? [] : this.marks;
    this.marks = known.filter(({ timeS }) => !marks.length || timeS < marks[0].timeS).concat(marks);
    const receivedS = performance.now() / 1000;
    let beforeS = null;
    let rows = [];
    for (const values of found.rows) {
      const timeS = Date.parse(values[0]) / 1000;
      // The service's clock was set back: rows of before would seem to be of the future.
      if (beforeS !== null && timeS < beforeS) rows = [];
      beforeS = timeS;
      rows.push({ timeS, spanS: Math.max(0.001, values[spanAt]), values, receivedS });
    }
    if (windowS === this.#windowS || rows.length === 0 || rows.at(-1).timeS < last.timeS) {
      if (windowS === this.#windowS) this.rows = rows;
      else if (rows.length) this.rows = [];
      return;
    }
    const fresh = rows.filter((row) => row.timeS > last.timeS);
    this.rows = this.rows.concat(fresh).filter((row) => row.timeS > fresh.at(-1)?.timeS - this.#windowS || !fresh.length);
  }

  /** Return whether the service has this column. */
  has(column) {
    return this.#columns.has(column);
  }

  /** Return the names of the columns that begin so. */
  columns(prefix) {
    return [...this.#columns.keys()].filter((column) => column.startsWith(prefix));
  }

  /** Return the sum of a counter over the last seconds. */
  sum(column, lastS = this.#windowS) {
    const index = this.#columns.get(column);
    return this.#latest(lastS).reduce((sum, row) => sum + row.values[index], 0);
  }

  /** Return a counter's increase per second over the last seconds. */
  rate(column, lastS) {
    const spanS = this.#latest(lastS).reduce((sum, row) => sum + row.spanS, 0);
    return spanS ? this.sum(column, lastS) / spanS : 0;
  }

  #latest(lastS) {
    const endS = this.rows.at(-1)?.timeS ?? 0;
    return this.rows.filter((row) => row.timeS > endS - lastS);
  }

  /**
   * Group rows by `stepS` seconds. Returns groups with end time, sums by counter and last values by gauge. Where nothing
   * ran, there is a group of which all is null.
   */
  grouped(stepS) {
    const groups = [];
    let beforeS = null;
    for (const row of this.rows) {
      const number = Math.floor(row.timeS / stepS);
      const beganS = row.timeS - row.spanS;
      if (beforeS !== null && beganS - beforeS > stepS) groups.push({ timeS: (beforeS + beganS) / 2, rows: [] });
      if (groups.at(-1)?.number !== number) groups.push({ number, rows: [] });
      groups.at(-1).rows.push(row);
      beforeS = row.timeS;
    }
    return groups.map(({ timeS, rows }) => {
      if (!rows.length) return { timeS, sum: () => null, rate: () => null, last: () => null };
      const spanS = rows.reduce((sum, row) => sum + row.spanS, 0);
      const sum = (column) => rows.reduce((total, row) => total + row.values[this.#columns.get(column)], 0);
      return {
        timeS: rows.at(-1).timeS,
        sum,
        rate: (column) => sum(column) / spanS,
        last: (column) => rows.at(-1).values[this.#columns.get(column)],
      };
    });
  }
}
