// Charts over time, drawn by uPlot in the colors of the style sheet.

import uPlot from "./vendor/uPlot.esm.js";
import { h, table } from "./dom.js";
import { clock } from "./format.js";

const POWERS_OF_TWO = Array.from({ length: 50 }, (_, exponent) => 2 ** exponent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/**
 * A chart of several series over time.
 *
 * series: [{label, color}], from the bottom to the top if `stacked`; `format` turns a value into text.
 * `set(fromS, toS, times, columns)` shows new values; a null is a gap. A table under the chart shows the same values.
 */
export class Chart {
  #options;
  #plot = null;
  #shown = null;
  #caption;

  constructor(title, { series, format, stacked = false, max = null, note = null, binary = false }, signal) {
    this.#options = { series, format, stacked, max, binary };
    this.holder = h("div", { class: "plot" });
    this.summary = h("p", { class: "hidden" });
    this.#caption = note ? `${title}: ${note}` : title;
    this.values = h("div", { class: "values", tabindex: "0", role: "region", "aria-label": `${title}, as a table` });
    this.details = h("details", { ontoggle: () => this.#tabulate() },
      h("summary", {}, "Show as table", h("span", { class: "hidden" }, `: ${title}`)), this.values);
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, title, note ? h("small", {}, note) : null),
      this.holder, this.summary, this.details);
    const resized = new ResizeObserver(() => this.#fit());
    resized.observe(this.holder);
    dark.addEventListener("change", () => this.#draw(), { signal });
    signal.addEventListener("abort", () => {
      resized.disconnect();
      this.#plot?.destroy();
    });
  }

  set(fromS, toS, times, columns) {
    this.#shown = { range: [fromS, toS], times, columns };
    const latest = this.#options.series.map(({ label }, index) => `${label} ${this.#text(columns[index].at(-1))}`);
    this.summary.textContent = times.length ? `At ${clock(times.at(-1))}: ${latest.join(", ")}.` : "No samples yet: the first comes with the first full interval.";
    this.summary.className = times.length ? "hidden" : "hint";
    if (this.#plot) this.#plot.setData(this.#data());
    else this.#draw();
    // What is being read stays.
    if (!this.values.matches(":hover, :focus")) this.#tabulate();
  }

  /** Fill the table, if it is open, with the latest values first. */
  #tabulate() {
    if (!this.details.open || !this.#shown) return;
    const { times, columns } = this.#shown;
    const made = table(this.#caption, [
      { name: "Time", cell: (index) => clock(times[index], true) },
      ...this.#options.series.map(({ label }, at) => ({ name: label, number: true, cell: (index) => this.#text(columns[at][index]) })),
    ], times.map((_, index) => times.length - 1 - index), "No samples yet.");
    made.classList.add("compact");
    this.values.replaceChildren(made);
  }

  #text(value) {
    return value === null || value === undefined ? "–" : this.#options.format(value);
  }

  /** Return the columns as drawn: for stacked areas sums, the topmost first, so that lower ones cover it. */
  #data() {
    const { times, columns } = this.#shown;
    if (!this.#options.stacked) return [times, ...columns];
    const sums = columns.map((_, index) =>
      times.map((_time, at) => columns.slice(0, index + 1).reduce((sum, column) => sum + column[at], 0)));
    return [times, ...sums.reverse()];
  }

  #fit() {
    const width = this.holder.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) this.#plot.setSize({ width, height: this.#height(width) });
    else if (!this.#plot && this.#shown) this.#draw();
  }

  #height(width) {
    return width < 420 ? 170 : 200;
  }

  #draw() {
    const width = this.holder.clientWidth;
    if (!this.#shown || !width) return;
    this.#plot?.destroy();
    const { series, stacked, format, max, binary } = this.#options;
    const axis = { stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const order = series.map((one, index) => ({ ...one, index }));
    if (stacked) order.reverse();
    this.#plot = new uPlot({
      width,
      height: this.#height(width),
      scales: {
        x: { time: true, range: () => this.#shown.range },
        y: { range: (_plot, _low, high) => [0, max ?? (high > 0 ? high * 1.08 : 1)] },
      },
      axes: [
        { ...axis, values: (_plot, ticks) => ticks.map((tick) => clock(tick)), space: 60, size: 30 },
        { ...axis, values: (_plot, ticks) => ticks.map(format), size: 68, ...(binary ? { incrs: POWERS_OF_TWO } : {}) },
      ],
      cursor: { drag: { x: false, y: false }, points: { show: !stacked } },
      series: [
        { label: "time", value: (_plot, at) => clock(at ?? this.#shown.times.at(-1) ?? this.#shown.range[1], true) },
        ...order.map((one) => ({
          label: one.label,
          stroke: color(one.color),
          fill: stacked ? color(one.color) : undefined,
          width: stacked ? 0 : 2,
          spanGaps: true,
          points: { show: stacked ? false : undefined },
          // Of stacked areas the value, not the sum.
          value: (_plot, _value, _series, at) => this.#text(at === null ? this.#shown.columns[one.index].at(-1) : this.#shown.columns[one.index][at]),
        })),
      ],
    }, this.#data(), this.holder);
  }
}
