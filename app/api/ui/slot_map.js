// The map of all slots: a canvas of cells, each of one slot or of several neighbors, which the service counts by class.

import { h, table } from "./dom.js";
import { count, percent } from "./format.js";

const STATES = {
  free: ["free", "no block"], storing: ["tier", "being stored or promoted"], ready: ["host", "can be loaded"],
  held: ["bad", "dropped, still read or written"], retired: ["computed", "leaves with a resize"],
};
const SCALE = ["scale-1", "scale-2", "scale-3", "scale-4", "scale-5", "scale-6"];
const TENANTS = ["computed", "device", "host", "tier", "tenant-4", "tenant-5", "tenant-6"];
const EMPTY = "free";
const TITLES = { state: "state", age: "age of the block", hits: "hits of the block", tenant: "tenant that stored the block" };
const MIN_CELL = 8;
const MAX_CELL = 16;
const MAX_HEIGHT = 264;
const MAX_CELLS = 4096;
const MAX_PARTS = 16;

/** Return a class's name, meaning, and color by its place among the classes. */
function styleOf(by, name, index, num) {
  if (by === "state") return { name, color: STATES[name]?.[0] ?? "computed", text: STATES[name] ? `${name} (${STATES[name][1]})` : name };
  if (index === 0) return { name, color: EMPTY, text: name };
  if (by === "tenant") return { name, color: index === num - 1 ? "tenant-7" : TENANTS[index - 1], text: name };
  return { name, color: SCALE[Math.min(index, SCALE.length) - 1], text: by === "hits" ? `${name} hits` : name };
}

function rgbOf(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

/** A map; `onChoose(first, last)` is called for the slots of a cell that was clicked, `linkOf(first, last)` returns their address. */
export class SlotMap {
  #map = null;
  #grid = null;
  #onChoose;
  #linkOf;

  constructor({ onChoose, linkOf }, signal) {
    this.#onChoose = onChoose;
    this.#linkOf = linkOf;
    this.canvas = h("canvas", { role: "img", "aria-label": "Map of the slots; the table below it has the same counts" });
    this.legend = h("ul", { class: "legend" });
    this.pointed = h("p", { class: "hint" });
    this.values = h("div", { class: "values", tabindex: "0", role: "region", "aria-label": "Slots, as a table" });
    this.details = h("details", { ontoggle: () => this.#tabulate() }, h("summary", {}, "Show as table", h("span", { class: "hidden" }, ": slots")), this.values);
    this.element = h("div", { class: "slot-map" }, this.canvas, this.pointed, this.legend, this.details);
    const resized = new ResizeObserver(() => this.#draw());
    resized.observe(this.element);
    signal.addEventListener("abort", () => resized.disconnect());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw(), { signal });
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#describe());
    this.canvas.addEventListener("click", (event) => {
      const range = this.#rangeAt(event);
      if (range) this.#onChoose(...range);
    });
  }

  /** Return how many cells fit. */
  get numCells() {
    const width = this.element.clientWidth || 320;
    return Math.min(MAX_CELLS, Math.floor(width / MIN_CELL) * Math.floor(MAX_HEIGHT / MIN_CELL));
  }

  /** Show an answer of `slots/map?by=`; `chosen` are the first and last slot of the blocks that are listed, or null. */
  set({ slots, slots_per_cell: perCell, by, classes, counts }, chosen) {
    const styles = classes.map((name, index) => styleOf(by, name, index, classes.length));
    this.#map = { slots, perCell, by, styles, counts, chosen, numCells: counts[0].length };
    this.#draw();
    if (!this.values.matches(":hover, :focus-within")) this.#tabulate();
  }

  #fit(width) {
    const { numCells } = this.#map;
    let cell = MAX_CELL;
    while (cell > 2 && Math.ceil(numCells / Math.floor(width / cell)) * cell > MAX_HEIGHT) cell -= 1;
    const columns = Math.max(1, Math.floor(width / cell));
    return { cell, columns, rows: Math.ceil(numCells / columns) };
  }

  #draw() {
    const width = this.element.clientWidth;
    if (!this.#map || !width) return;
    const { styles, counts, numCells, slots, perCell, chosen } = this.#map;
    const { cell, columns, rows } = this.#grid = this.#fit(width);
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = columns * cell * ratio;
    this.canvas.height = rows * cell * ratio;
    this.canvas.style.width = `${columns * cell}px`;
    this.canvas.style.height = `${rows * cell}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const colors = styles.map(({ color }) => rgbOf(color));
    for (let number = 0; number < numCells; number += 1) {
      const num = Math.min(perCell, slots - number * perCell);
      const mixed = [0, 1, 2].map((part) => counts.reduce((sum, row, at) => sum + (row[number] * colors[at][part]) / num, 0));
      context.fillStyle = `rgb(${mixed.map(Math.round).join(" ")})`;
      context.fillRect((number % columns) * cell, Math.floor(number / columns) * cell, cell - 1, cell - 1);
    }
    if (chosen) {
      const number = Math.floor(chosen[0] / perCell);
      context.lineWidth = 2;
      context.strokeStyle = `rgb(${rgbOf("ink").join(" ")})`;
      if (number < numCells) context.strokeRect((number % columns) * cell, Math.floor(number / columns) * cell, cell - 1, cell - 1);
    }
    this.#describe();
  }

  #sums(from, to) {
    return this.#map.counts.map((row) => row.slice(from, to).reduce((sum, number) => sum + number, 0));
  }

  #describe() {
    const { perCell, styles, numCells, by } = this.#map;
    this.pointed.textContent = `${perCell === 1 ? "Each cell is a slot" : `Each cell is ${count(perCell)} slots, and its color their mixture`}, by ${TITLES[by]}. Choose one to list its blocks.`;
    const sums = this.#sums(0, numCells);
    this.legend.replaceChildren(...styles.map(({ color, text }, at) => h("li", {}, h("i", { class: color }), `${text}: ${count(sums[at])}`)));
  }

  #rangeOf(fromCell, toCell) {
    const { perCell, slots } = this.#map;
    return [fromCell * perCell, Math.min(slots, toCell * perCell) - 1];
  }

  #rangeAt(event) {
    if (!this.#map || !this.#grid) return null;
    const { cell, columns } = this.#grid;
    const number = Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell);
    return number < this.#map.numCells && event.offsetX < columns * cell ? this.#rangeOf(number, number + 1) : null;
  }

  #point(event) {
    const range = this.#rangeAt(event);
    if (!range) return;
    const [first, last] = range;
    const number = Math.floor(first / this.#map.perCell);
    const sums = this.#sums(number, number + 1);
    const found = this.#map.styles.map(({ text }, at) => ({ text, num: sums[at] })).filter(({ num }) => num);
    this.pointed.textContent = first === last ? `Slot ${count(first)}: ${found[0]?.text}` :
      `Slots ${count(first)} to ${count(last)}: ${found.map(({ text, num }) => `${count(num)} ${text}`).join(", ")}`;
  }

  /** Fill the table, if it is open: the pool in up to 16 parts, which link to their blocks. */
  #tabulate() {
    if (!this.details.open || !this.#map) return;
    const { numCells, styles, by } = this.#map;
    const step = Math.ceil(numCells / MAX_PARTS);
    const parts = Array.from({ length: Math.ceil(numCells / step) }, (_, at) => [at * step, Math.min(numCells, (at + 1) * step)]);
    const total = this.#map.slots;
    const made = table(`Slots by ${TITLES[by]}`, [
      { name: "Slots", cell: (part) => (part === null ? "all" : this.#link(this.#rangeOf(...part))) },
      ...styles.map(({ name }, index) => ({ name, number: true, cell: (part) => {
        const number = this.#sums(...(part ?? [0, numCells]))[index];
        return part === null ? `${count(number)} (${percent(number, total)})` : count(number);
      } })),
    ], [null, ...parts]);
    made.classList.add("compact");
    this.values.replaceChildren(made);
  }

  #link([first, last]) {
    return h("a", { href: this.#linkOf(first, last) }, `${count(first)} to ${count(last)}`);
  }
}
