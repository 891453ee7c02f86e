// Elements, and points as small pictures or columns of numbers.

import { compact, number } from "./format.js";

const MOST_NUMBERS = 4;

/** An element with attributes, listeners (`onclick`) and children. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

/** Make the sheets of pictures known to the style sheet, once. */
export function hangSheets(start) {
  for (const name of ["points", "queries"]) {
    const sheet = start[name].sheet;
    if (sheet) document.documentElement.style.setProperty(`--sheet-${name}`, `url(${sheet.url})`);
  }
}

/** One point or query: its part of the sheet, or its first numbers. */
export function picture(drawn, name, i) {
  const sheet = drawn.sheet;
  if (!sheet) {
    const more = drawn.rows[i].length > MOST_NUMBERS ? ["…"] : [];
    const lines = [...drawn.rows[i].slice(0, MOST_NUMBERS).map(compact), ...more];
    return element("span", { class: "numbers" }, lines.join("\n"));
  }
  const made = element("span", { class: `picture ${name}${sheet.grey ? " grey" : ""}`, "aria-hidden": "true" });
  const column = i % sheet.columns;
  const row = Math.floor(i / sheet.columns);
  const along = (place, of) => (of > 1 ? `${(100 * place) / (of - 1)}%` : "0%");
  made.style.backgroundSize = `${100 * sheet.columns}% ${100 * sheet.rows}%`;
  made.style.backgroundPosition = `${along(column, sheet.columns)} ${along(row, sheet.rows)}`;
  made.style.aspectRatio = String(sheet.ratio);
  return made;
}

/** A training point as a button that selects it. */
export function pointCard(start, i, { top, bottom, kind = "", pressed, gone, title, onpick }) {
  return element(
    "button",
    {
      type: "button",
      class: `card ${kind}${gone ? " gone" : ""}`,
      "data-point": i,
      "aria-pressed": String(pressed),
      title,
      onclick: (event) => onpick(i, event),
    },
    picture(start.points, "points", i),
    element("span", { class: "top" }, top),
    bottom ? element("span", { class: "bottom" }, bottom) : null,
  );
}

/** A label as the page writes it. */
export function labelText(label) {
  return Array.isArray(label) ? label.map(compact).join(" ") : number(label, 3);
}

/** Offer text as a file. */
export function offer(name, text, type) {
  const link = element("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}
