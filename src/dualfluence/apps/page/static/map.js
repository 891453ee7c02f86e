// The map of the training set: every point is written as its label, at its place in the kernel's plane.

import { labelText } from "./cards.js";

const WIDTH = 1000;
const MARGIN = 40;
const REACH = 18; // pixels from which a click still means the nearest point
const STEP = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

export class TrainingMap {
  /** `onpick(points, add)`, `onhover(point)`, `ondelete()`, `onclear()`. */
  constructor(svg, at, listeners) {
    this.svg = svg;
    this.listeners = listeners;
    this.cursor = null;
    this.lassoOnTouch = false;
    this.removed = new Set();
    const ys = at.map((p) => p[1]);
    const low = Math.min(...ys);
    const height = Math.max((Math.max(...ys) - low) * (WIDTH - 2 * MARGIN), 300) + 2 * MARGIN;
    this.places = at.map(([x, y]) => [
      MARGIN + x * (WIDTH - 2 * MARGIN),
      height - MARGIN - (y - low) * (WIDTH - 2 * MARGIN),
    ]);
    svg.setAttribute("viewBox", `0 0 ${WIDTH} ${height.toFixed(0)}`);
    this.rings = this.make("g", { class: "rings" });
    this.glyphs = this.make("g", { class: "glyphs" });
    this.loop = this.make("polygon", { class: "loop" });
    this.ring = this.make("circle", { class: "cursor" });
    svg.append(this.rings, this.glyphs, this.loop, this.ring);
    this.marks = this.places.map(([x, y], i) => {
      const mark = this.make("text", { x, y, id: `point-${i}`, role: "option", "data-point": i });
      this.glyphs.append(mark);
      return mark;
    });
    this.listen();
    new ResizeObserver(() => this.resize()).observe(svg);
  }

  make(tag, attributes = {}) {
    const made = document.createElementNS(this.svg.namespaceURI, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  }

  /** Glyphs keep their size in pixels, whatever the width of the page. */
  resize() {
    const pixels = this.svg.clientWidth || WIDTH;
    this.unit = WIDTH / pixels;
    this.svg.style.setProperty("--unit", this.unit);
    this.svg.style.setProperty("--glyph", `${Math.min(13, Math.max(8, 13 * Math.sqrt(500 / this.places.length)))}px`);
  }

  /** `look(i)` gives `{ fill, size }`; sets hold positions. */
  draw({ labels, kind, look, selected, removed, relabelled }) {
    this.removed = removed;
    this.marks.forEach((mark, i) => {
      const { fill, size } = look(i);
      const label = labelText(labels[i]);
      mark.textContent = kind === "number" ? "●" : label;
      mark.style.fill = fill;
      mark.style.setProperty("--size", size);
      mark.setAttribute("class", classes(removed.has(i) && "gone", relabelled.has(i) && "changed"));
      mark.setAttribute("aria-selected", String(selected.has(i)));
      const gone = removed.has(i) ? ", removed" : "";
      mark.setAttribute("aria-label", `point ${i}, label ${label}${gone}`);
    });
    const rings = [...selected].map((i) => {
      const [cx, cy] = this.places[i];
      return this.make("circle", { cx, cy, "data-ring": i });
    });
    this.rings.replaceChildren(...rings);
  }

  listen() {
    const { svg } = this;
    svg.addEventListener("pointerdown", (event) => this.down(event));
    svg.addEventListener("pointermove", (event) => this.move(event));
    svg.addEventListener("pointerup", (event) => this.up(event));
    svg.addEventListener("pointercancel", () => this.drop());
    svg.addEventListener("pointerleave", () => this.path || this.listeners.onhover(this.focused()));
    svg.addEventListener("keydown", (event) => this.key(event));
    svg.addEventListener("focus", () => svg.matches(":focus-visible") && this.setCursor(this.cursor ?? 0));
    svg.addEventListener("blur", () => this.setCursor(null));
  }

  focused() {
    return document.activeElement === this.svg ? this.cursor : null;
  }

  where(event) {
    const box = this.svg.getBoundingClientRect();
    const unit = WIDTH / box.width;
    return [(event.clientX - box.left) * unit, (event.clientY - box.top) * unit];
  }

  nearest([x, y]) {
    let best = null;
    let least = (REACH * this.unit) ** 2;
    this.places.forEach(([px, py], i) => {
      const distance = (px - x) ** 2 + (py - y) ** 2;
      if (distance < least) [best, least] = [i, distance];
    });
    return best;
  }

  down(event) {
    if (event.button !== 0) return;
    this.began = this.where(event);
    this.path = null;
    this.mayLasso = event.pointerType === "mouse" || this.lassoOnTouch;
    if (this.mayLasso) this.svg.setPointerCapture(event.pointerId);
  }

  move(event) {
    const here = this.where(event);
    if (!this.began) return this.listeners.onhover(this.nearest(here) ?? this.focused());
    if (!this.mayLasso) return;
    const far = Math.hypot(here[0] - this.began[0], here[1] - this.began[1]) > 5 * this.unit;
    if (!this.path && far) this.path = [this.began];
    if (this.path) {
      this.path.push(here);
      this.loop.setAttribute("points", this.path.map((p) => p.join(",")).join(" "));
    }
  }

  up(event) {
    if (!this.began) return;
    const add = event.shiftKey || event.ctrlKey || event.metaKey;
    if (this.path) {
      this.listeners.onpick(this.inside(this.path), add);
    } else {
      const point = this.nearest(this.where(event));
      if (point !== null) this.listeners.onpick([point], add || event.pointerType !== "mouse", true);
      else if (!add) this.listeners.onclear();
      this.listeners.onhover(point);
    }
    this.drop();
  }

  drop() {
    this.began = this.path = null;
    this.loop.removeAttribute("points");
  }

  /** Points inside of a closed path that are still in the training set. */
  inside(path) {
    const within = ([x, y]) => {
      let odd = false;
      for (let i = 0, j = path.length - 1; i < path.length; j = i++) {
        const [xi, yi] = path[i];
        const [xj, yj] = path[j];
        if (yi > y !== yj > y && x < ((xj - xi) * (y - yi)) / (yj - yi) + xi) odd = !odd;
      }
      return odd;
    };
    return this.places.flatMap((place, i) => (!this.removed.has(i) && within(place) ? [i] : []));
  }

  key(event) {
    const step = STEP[event.key];
    if (step) this.setCursor(this.next(step));
    else if ((event.key === " " || event.key === "Enter") && this.cursor !== null) {
      this.listeners.onpick([this.cursor], true, true);
    } else if (event.key === "Delete" || event.key === "Backspace") this.listeners.ondelete();
    else if (event.key === "Escape") this.listeners.onclear();
    else return;
    event.preventDefault();
  }

  /** The nearest point in a direction: sideways counts double. */
  next([dx, dy]) {
    if (this.cursor === null) return 0;
    const [x, y] = this.places[this.cursor];
    let best = this.cursor;
    let least = Infinity;
    this.places.forEach(([px, py], i) => {
      const along = (px - x) * dx + (py - y) * dy;
      const cost = along + 2 * Math.abs((px - x) * dy + (py - y) * dx);
      if (along > 1e-6 && cost < least) [best, least] = [i, cost];
    });
    return best;
  }

  setCursor(point) {
    if (point !== null) this.cursor = point;
    this.ring.classList.toggle("shown", point !== null);
    if (point === null) return this.listeners.onhover(null);
    const [x, y] = this.places[point];
    this.ring.setAttribute("cx", x);
    this.ring.setAttribute("cy", y);
    this.svg.setAttribute("aria-activedescendant", `point-${point}`);
    this.listeners.onhover(point, true);
  }
}

function classes(...names) {
  return names.filter(Boolean).join(" ");
}
