// Points worth a look: labels that look wrong, harmful and isolated points, and whole groups.

import { element, labelText, pointCard } from "./cards.js";
import { count, number, signed } from "./format.js";

const SHOWN = { suspicious: 24, harmful: 16, isolated: 16 };

const WORDS = {
  suspicious:
    "The model that never saw the point disagrees most with its label. Check these first. After the arrow: the " +
    "answer of that model. The number is the loss of the label.",
  harmful: "Leaving one of these out lowers the mean loss of the queries most. The number is the change.",
  isolated: "No other point is like these: rare cases, or errors of measurement. 1 means no similar point, 0 an identical one.",
  groups:
    "Change of the queries' mean loss if a whole group were left out, beside the sum of the effects of its points one by one. " +
    "A large difference means that the points can replace each other.",
};

/** One of the lists; `groups` are fetched by the caller. */
export function drawFinding(app, which, groups, onpick, ongroup) {
  document.getElementById("finding-words").textContent = WORDS[which];
  const place = document.getElementById("finding");
  if (which === "groups") return place.replaceChildren(groupTable(app, groups, ongroup));
  const values = {
    suspicious: app.scores.without,
    harmful: app.scores.harm,
    isolated: app.start.points.isolation,
  }[which];
  if (!values) return place.replaceChildren(element("p", {}, "Not available: this kernel has no entries to compare."));
  const order = values
    .map((value, i) => [value, i])
    .filter(([value, i]) => !app.removed.has(i) && (which !== "harmful" || value > 0))
    .sort((a, b) => b[0] - a[0] || a[1] - b[1])
    .slice(0, SHOWN[which]);
  const cards = order.map(([value, i]) =>
    pointCard(app.start, i, {
      top: saying(app, i),
      bottom: which === "harmful" ? signed(-value) : number(value, 2),
      kind: which === "isolated" ? "" : "harmful",
      pressed: app.selected.has(i),
      title: `point ${i}`,
      onpick,
    }),
  );
  place.replaceChildren(element("div", { class: "cards wide" }, ...cards));
}

/** The label, and what the model without the point says instead. */
function saying(app, i) {
  const label = labelText(app.state.labels[i]);
  const said = app.scores.said?.[i];
  return said === undefined || said === app.state.labels[i] ? label : `${label} → ${said}?`;
}

function groupTable(app, groups, ongroup) {
  if (!groups) return element("p", { class: "small" }, "Computing: each group is left out in turn …");
  if (!groups.names.length) return element("p", {}, "The data have no groups.");
  const largest = Math.max(...groups.mean.map(Math.abs), 1e-12);
  const order = [...groups.names.keys()].sort((a, b) => groups.mean[b] - groups.mean[a]);
  const rows = order.map((j) => {
    const value = groups.mean[j];
    const bar = element("span", { class: value < 0 ? "length down" : "length" });
    bar.style.width = `${(100 * Math.abs(value)) / largest}%`;
    const name = element("button", { type: "button", class: "plain", onclick: () => ongroup(groups.names[j]) }, groups.names[j]);
    return element(
      "tr",
      {},
      element("th", { scope: "row" }, name),
      element("td", {}, String(groups.sizes[j])),
      element("td", {}, signed(value, 3)),
      element("td", { class: "lengths" }, bar),
      element("td", {}, signed(groups.sums[j], 3)),
    );
  });
  const head = ["group", "points", "loss changes by", "", "one by one"].map((h) => element("th", { scope: "col" }, h));
  return element(
    "div",
    { class: "scroll", tabindex: "0", role: "region", "aria-label": `Effects of ${count(rows.length, "group")}` },
    element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows)),
  );
}
