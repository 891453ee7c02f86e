// One query: what the model says, how sure it is, and the training points behind it.

import { element, labelText, picture, pointCard } from "./cards.js";
import { count, number, probability, signed } from "./format.js";

const STRONGEST = 8;

/** The class with the largest probability. */
export function best(answer) {
  return answer.indexOf(Math.max(...answer));
}

/** Whether a query's answer is its label; `null` where answers are numbers. */
export function isRight(app, state, q) {
  if (app.start.kind === "number") return null;
  return best(state.answers[q]) === app.start.queries.labels[q];
}

/** The strip of queries to choose from, drawn once; `onpick(q)`. */
export function drawQueries(app, place, onpick) {
  const { labels } = app.start.queries;
  const made = labels.map((label, q) =>
    element(
      "div",
      { role: "option", id: `query-${q}`, class: "frame", "data-query": q, onclick: () => onpick(q) },
      picture(app.start.queries, "queries", q),
      element("span", { class: "mark-line" }, `${labelText(label)}`),
    ),
  );
  place.replaceChildren(...made);
  place.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowUp: -1, ArrowRight: 1, ArrowDown: 1 }[event.key];
    const end = { Home: 0, End: labels.length - 1 }[event.key];
    if (step === undefined && end === undefined) return;
    onpick(end ?? Math.min(labels.length - 1, Math.max(0, app.query + step)));
    event.preventDefault();
  });
}

/** Mark the chosen query, wrong answers, and answers that an edit changed. */
export function markQueries(app, place) {
  [...place.children].forEach((frame, q) => {
    const right = isRight(app, app.state, q);
    const changed = right !== null && best(app.state.answers[q]) !== best(app.first.answers[q]);
    frame.setAttribute("aria-selected", String(q === app.query));
    frame.classList.toggle("wrong", right === false);
    frame.classList.toggle("changed", changed);
    const says = right === null ? "" : right ? ", answered right" : ", answered wrong";
    const label = labelText(app.start.queries.labels[q]);
    frame.setAttribute("aria-label", `query ${q}, truth ${label}${says}${changed ? ", changed" : ""}`);
    frame.querySelector(".mark-line").textContent = label + (right === false ? " ✗" : "") + (changed ? " •" : "");
  });
  place.setAttribute("aria-activedescendant", `query-${app.query}`);
}

/** Picture, verdict and bars of the chosen query; bars of a preview lie beside the present ones. */
export function drawAnswer(app) {
  const q = app.query;
  const at = (id) => document.getElementById(id);
  at("query-title").textContent = `Query ${q}`;
  at("query-number").value = q;
  at("query-picture").replaceChildren(picture(app.start.queries, "queries", q));
  const label = app.start.queries.labels[q];
  const answer = app.state.answers[q];
  const loss = `loss ${number(app.state.losses[q])}`;
  const moved = app.state.losses[q] - app.first.losses[q];
  const since = app.state.version === app.first.version ? "" : ` (${signed(moved)} since the fit)`;
  const right = isRight(app, app.state, q);
  const says = right === null ? answer.map((v) => number(v)).join(", ") : best(answer);
  at("verdict").replaceChildren(
    element("span", { class: "says" }, "The model says ", element("b", {}, String(says)), right === null ? "" : right ? " ✓" : " ✗"),
    element("span", { class: "small" }, `truth ${labelText(label)} · ${loss}${since}`),
  );
  const shown = right !== null;
  at("bars").hidden = !shown;
  if (shown) at("bars").replaceChildren(...answer.map((p, k) => bar(app, k, p, k === label)));
  at("bars-note").textContent = shown ? note(app) : "";
}

function note(app) {
  const tick = "Tick: before any edit.";
  return app.preview ? `${tick} Outline: without the selection.` : tick;
}

function bar(app, k, p, truth) {
  const q = app.query;
  const row = element("div", { class: `bar${truth ? " truth" : ""}`, "data-class": k });
  const track = element("span", { class: "track" });
  const part = (name, value) => {
    const made = element("span", { class: name });
    made.style[name === "tick" ? "left" : "width"] = `${100 * value}%`;
    return made;
  };
  track.append(part("fill", p));
  if (app.preview) track.append(part("ghost", app.preview.answers[q][k]));
  track.append(part("tick", app.first.answers[q][k]));
  row.append(
    element("span", { class: "name" }, app.start.classes[k]),
    track,
    element("span", { class: "value" }, probability(p)),
  );
  return row;
}

/** In place of what is computed still, or could not be. */
export function notYet(app) {
  if (app.failed) return element("p", { class: "small" }, "Not computed: see above.");
  return element("p", { class: "small computing" }, "Computing for the present model …");
}

/** The strips of helpful and harmful points; words instead while these are computed. */
export function drawStrips(app, onpick) {
  if (!app.scores) {
    for (const kind of ["helpful", "harmful"]) document.getElementById(kind).replaceChildren(notYet(app));
    return;
  }
  const effects = app.scores.effects[app.query];
  const order = [...effects.keys()].filter((i) => !app.removed.has(i)).sort((a, b) => effects[b] - effects[a]);
  const sides = {
    helpful: order.filter((i) => effects[i] > 0).slice(0, STRONGEST),
    harmful: order.filter((i) => effects[i] < 0).reverse().slice(0, STRONGEST),
  };
  for (const [kind, points] of Object.entries(sides)) {
    const cards = points.map((i) =>
      pointCard(app.start, i, {
        top: labelText(app.state.labels[i]),
        bottom: number(Math.abs(effects[i]), 2),
        kind,
        pressed: app.selected.has(i),
        title: `point ${i}, label ${labelText(app.state.labels[i])}: without it the loss changes by ${signed(effects[i])}`,
        onpick,
      }),
    );
    const none = element("p", { class: "small" }, `No ${kind} point.`);
    document.getElementById(kind).replaceChildren(...(cards.length ? cards : [none]));
  }
}

/** What all queries say, in a few words. */
export function summary(app, state) {
  const n = state.losses.length;
  const mean = state.losses.reduce((a, b) => a + b, 0) / n;
  const loss = `mean loss ${number(mean)}`;
  if (app.start.kind === "number") return `${count(n, "query").replace("querys", "queries")}, ${loss}`;
  const right = state.losses.filter((_, q) => isRight(app, state, q)).length;
  return `${right} of ${n} queries right, ${loss}`;
}

/** How many answers differ between two states. */
export function changedAnswers(before, after) {
  return before.answers.filter((answer, q) => best(answer) !== best(after.answers[q])).length;
}
