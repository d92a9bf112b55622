// The map of all slots: a canvas of cells, each of one slot or of several neighbors.

import { h } from "./dom.js";
import { count } from "./format.js";

const COLORS = { free: "free", storing: "tier", ready: "host", held: "bad", retired: "computed" };
const MEANINGS = { storing: "being stored or promoted", ready: "can be loaded", held: "dropped, still read or written", retired: "leaves with a resize" };
const MIN_CELL = 4;
const MAX_CELL = 14;
const MAX_HEIGHT = 260;

function rgbOf(name) {
  const text = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  return [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
}

export class SlotMap {
  #map = null;

  constructor(signal) {
    this.canvas = h("canvas", { role: "img", "aria-label": "Map of the slots by state" });
    this.legend = h("ul", { class: "legend" });
    this.pointed = h("p", { class: "hint" });
    this.element = h("div", { class: "slot-map" }, this.canvas, this.pointed, this.legend);
    const resized = new ResizeObserver(() => this.#draw());
    resized.observe(this.element);
    signal.addEventListener("abort", () => resized.disconnect());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw(), { signal });
    this.canvas.addEventListener("pointermove", (event) => this.#point(event));
    this.canvas.addEventListener("pointerleave", () => this.#describe());
  }

  set({ slots, states, legend }) {
    const bytes = Uint8Array.from(atob(states), (char) => char.charCodeAt(0));
    this.#map = { slots, bytes, names: new Map(Object.entries(legend).map(([name, code]) => [code, name])) };
    this.#draw();
  }

  #counts(from, to) {
    const counts = new Map();
    for (let slot = from; slot < to; slot += 1) {
      const name = this.#map.names.get(this.#map.bytes[slot]);
      counts.set(name, (counts.get(name) || 0) + 1);
    }
    return counts;
  }

  /** Choose the cells: as large as they may be, and of several slots if there are too many for one each. */
  #grid(width) {
    const { slots } = this.#map;
    let cell = MAX_CELL;
    while (cell > MIN_CELL && Math.ceil(slots / Math.floor(width / cell)) * cell > MAX_HEIGHT) cell -= 1;
    const columns = Math.max(1, Math.floor(width / cell));
    const maxCells = columns * Math.floor(MAX_HEIGHT / cell);
    const perCell = Math.ceil(slots / maxCells);
    return { cell, columns, perCell, rows: Math.ceil(slots / perCell / columns) };
  }

  #draw() {
    const width = this.element.clientWidth;
    if (!this.#map || !width) return;
    const grid = this.#grid(width);
    const { cell, columns, perCell, rows } = grid;
    this.grid = grid;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = columns * cell * ratio;
    this.canvas.height = rows * cell * ratio;
    this.canvas.style.width = `${columns * cell}px`;
    this.canvas.style.height = `${rows * cell}px`;
    const context = this.canvas.getContext("2d");
    context.scale(ratio, ratio);
    const colors = new Map([...this.#map.names.values()].map((name) => [name, rgbOf(COLORS[name] ?? "computed")]));
    for (let number = 0; number * perCell < this.#map.slots; number += 1) {
      const from = number * perCell;
      const to = Math.min(this.#map.slots, from + perCell);
      const mixed = [0, 0, 0];
      for (const [name, share] of this.#counts(from, to)) {
        colors.get(name).forEach((part, at) => { mixed[at] += (part * share) / (to - from); });
      }
      context.fillStyle = `rgb(${mixed.map(Math.round).join(" ")})`;
      context.fillRect((number % columns) * cell, Math.floor(number / columns) * cell, cell - 1, cell - 1);
    }
    this.#describe();
  }

  #describe() {
    const counts = this.#counts(0, this.#map.slots);
    const { perCell } = this.grid;
    this.pointed.textContent = perCell === 1 ? "Each cell is a slot." : `Each cell is ${count(perCell)} slots; its color is their mixture.`;
    this.legend.replaceChildren(...[...this.#map.names.values()].map((name) => h("li", {}, h("i", { class: COLORS[name] ?? "computed" }),
      `${name}${MEANINGS[name] ? ` (${MEANINGS[name]})` : ""}: ${count(counts.get(name) || 0)}`)));
  }

  #point(event) {
    if (!this.#map) return;
    const { cell, columns, perCell } = this.grid;
    const from = (Math.floor(event.offsetY / cell) * columns + Math.floor(event.offsetX / cell)) * perCell;
    if (from >= this.#map.slots) return;
    const to = Math.min(this.#map.slots, from + perCell);
    const found = [...this.#counts(from, to)].map(([name, number]) => `${count(number)} ${name}`).join(", ");
    this.pointed.textContent = perCell === 1 ? `Slot ${count(from)}: ${found.replace("1 ", "")}` : `Slots ${count(from)} to ${count(to - 1)}: ${found}`;
  }
}
