// Charts over time or over sizes, drawn by uPlot in the colors of the style sheet.

import uPlot from "./vendor/uPlot.esm.js";
import { h, table } from "./dom.js";
import { clock } from "./format.js";

const POWERS_OF_TWO = Array.from({ length: 50 }, (_, exponent) => 2 ** exponent);
/** Values this near to each other are joined, also if there are none between them. */
const MAX_JOINED_PX = 20;
const dark = matchMedia("(prefers-color-scheme: dark)");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

/** Return the indexes of values without a value on either side, which no line shows; null if all are shown as points. */
const lone = (plot, index, areAllShown) => (areAllShown ? null :
  plot.data[index].flatMap((value, at, all) => (value !== null && (all[at - 1] ?? all[at + 1] ?? null) === null ? [at] : [])));

/**
 * A chart of several series over time, or with `along` ({name, format}) over sizes on a logarithmic axis.
 *
 * series: [{label, color, dash, isPoint}], from the bottom to the top if `stacked`; `format` turns a value into text.
 * `set(from, to, times, columns, marks)` shows new values; a null is a gap. Marks ({timeS, kind, text}) are vertical
 * lines. A table under the chart shows the same values and marks.
 */
export class Chart {
  #options;
  #plot = null;
  #shown = null;
  #caption;

  constructor(title, { series, format, stacked = false, max = null, note = null, binary = false, along = null }, signal) {
    this.#options = { series, format, stacked, max, binary, along };
    this.holder = h("div", { class: "plot" });
    this.summary = h("p", { class: "hidden" });
    this.#caption = title;
    this.note = h("small", { hidden: !note }, note);
    this.legend = h("p", { class: "hint marks", hidden: true });
    this.values = h("div", { class: "values", tabindex: "0", role: "region", "aria-label": `${title}, as a table` });
    this.details = h("details", { ontoggle: () => this.#tabulate() },
      h("summary", {}, "Show as table", h("span", { class: "hidden" }, `: ${title}`)), this.values);
    this.element = h("figure", { class: "card chart" }, h("figcaption", {}, title, this.note),
      this.holder, this.legend, this.summary, this.details);
    const resized = new ResizeObserver(() => this.#fit());
    resized.observe(this.holder);
    dark.addEventListener("change", () => this.#draw(), { signal });
    signal.addEventListener("abort", () => {
      resized.disconnect();
      this.#plot?.destroy();
    });
  }

  set(from, to, times, columns, marks = []) {
    this.#shown = { range: [from, to], times, columns, marks: marks.filter(({ timeS }) => timeS >= from && timeS <= to) };
    const [last, ...earlier] = this.#shown.marks.toReversed();
    this.legend.hidden = !last;
    if (last) this.legend.textContent = `Lines: ${this.#at(last.timeS)} ${last.text}${earlier.length ? `, and ${earlier.length} earlier` : ""}`;
    const latest = this.#options.series.map(({ label }, index) => `${label} ${this.#text(columns[index].at(-1))}`);
    this.summary.textContent = times.length ? `At ${this.#at(times.at(-1))}: ${latest.join(", ")}.` : "No samples yet: the first comes with the first full interval.";
    this.summary.className = times.length ? "hidden" : "hint";
    if (this.#plot) this.#plot.setData(this.#data());
    else this.#draw();
    // What is being read stays.
    if (!this.values.matches(":hover, :focus")) this.#tabulate();
  }

  /** Fill the table, if it is open, with the latest values first. */
  #tabulate() {
    if (!this.details.open || !this.#shown) return;
    const { times } = this.#shown;
    const { along } = this.#options;
    const note = this.note.textContent;
    const made = table(note ? `${this.#caption}: ${note}` : this.#caption, [
      { name: along?.name ?? "Time", cell: (index) => this.#at(times[index], true) },
      ...this.#options.series.map(({ label }, at) => ({ name: label, number: true, cell: (index) => this.#text(this.#shown.columns[at][index]) })),
    ], times.map((_, index) => (along ? index : times.length - 1 - index)), "No samples yet.");
    made.classList.add("compact");
    this.values.replaceChildren(made, this.#shown.marks.length ? table("Starts and changes", [
      { name: "Time", cell: ({ timeS }) => this.#at(timeS, true) },
      { name: "What", cell: ({ text }) => text },
    ], this.#shown.marks.toReversed(), "") : "");
  }

  /** Return a place on the horizontal axis as text. */
  #at(value, withSeconds = false) {
    return this.#options.along ? this.#options.along.format(value) : clock(value, withSeconds);
  }

  #text(value) {
    return value === null || value === undefined ? "–" : this.#options.format(value);
  }

  /** Return the columns as drawn: for stacked areas sums, the topmost first, so that lower ones cover it. */
  #data() {
    const { times, columns } = this.#shown;
    if (!this.#options.stacked) return [times, ...columns];
    const sums = columns.map((_, index) =>
      times.map((_time, at) => (columns[index][at] === null ? null : columns.slice(0, index + 1).reduce((sum, column) => sum + column[at], 0))));
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
    const { series, stacked, format, max, binary, along } = this.#options;
    const axis = { stroke: color("faint"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const order = series.map((one, index) => ({ ...one, index }));
    if (stacked) order.reverse();
    this.#plot = new uPlot({
      width,
      height: this.#height(width),
      scales: {
        x: along ? { time: false, distr: 3, log: 2, range: () => this.#shown.range } : { time: true, range: () => this.#shown.range },
        y: { range: (_plot, _low, high) => [0, max ?? (1.08 * (high ?? 0) || 1)] },
      },
      axes: [
        { ...axis, values: (_plot, ticks) => ticks.map((tick) => this.#at(tick)), space: 60, size: 30,
          ...(along ? { splits: () => this.#octaves(width < 520 ? 4 : 2), filter: (_plot, splits) => splits } : {}) },
        { ...axis, values: (_plot, ticks) => ticks.map(format), size: 68, ...(binary ? { incrs: POWERS_OF_TWO } : {}) },
      ],
      hooks: { draw: [(plot) => this.#drawMarks(plot)] },
      cursor: { drag: { x: false, y: false }, points: { show: !stacked } },
      series: [
        { label: along?.name ?? "time", value: (_plot, at) => this.#at(at ?? this.#shown.times.at(-1) ?? this.#shown.range[1], true) },
        ...order.map((one) => ({
          label: one.label,
          stroke: color(one.color),
          fill: stacked ? color(one.color) : undefined,
          width: stacked ? 0 : 2,
          dash: one.dash,
          gaps: (_plot, _index, _from, _to, gaps) => gaps.filter(([left, right]) => right - left > MAX_JOINED_PX * devicePixelRatio),
          points: one.isPoint ? { show: true, size: 13, width: 2, fill: color("surface") } : { show: stacked ? false : undefined, filter: stacked ? null : lone },
          // Of stacked areas the value, not the sum.
          value: (_plot, _value, _series, at) => this.#text(at === null ? this.#shown.columns[one.index].at(-1) : this.#shown.columns[one.index][at]),
        })),
      ],
    }, this.#data(), this.holder);
  }

  #drawMarks(plot) {
    for (const line of plot.over.querySelectorAll(".mark")) line.remove();
    plot.over.append(...this.#shown.marks.map(({ timeS, kind, text }) => {
      const line = h("div", { class: `mark ${kind}`, title: `${this.#at(timeS, true)} ${text}` });
      line.style.left = `${plot.valToPos(timeS, "x")}px`;
      return line;
    }));
  }

  /** Return the sizes that the horizontal axis names, each so many times the one before. */
  #octaves(factor) {
    const [from, to] = this.#shown.range;
    const octaves = [];
    for (let at = this.#shown.times[0]; at >= from && at <= to; at *= factor) octaves.push(at);
    return octaves;
  }
}
