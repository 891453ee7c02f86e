// How near the model is to retraining, and what was done to it.

import { element, labelText } from "./cards.js";
import { count, duration, listed, number, percent } from "./format.js";

/** The bound in large letters, and the facts beside it. */
export function drawCertificate(app) {
  const { certificate, stats } = app.state;
  const bound = certificate.relative_bound;
  document.getElementById("bound").textContent = bound === null ? "no certificate" : `≤ ${percent(bound)}`;
  document.getElementById("bound-words").textContent =
    bound === null
      ? "The network is not linear in its parameters: every number here is an estimate."
      : "of the training distance: this model is at most that far from one retrained from scratch on the present training set.";
  const facts = [
    ["distance bound", certificate.distance_bound === null ? "none" : number(certificate.distance_bound), "distance"],
    ["relative bound", bound === null ? "none" : number(bound), "relative"],
    ["converged", stats.converged ? "yes" : "no", "converged"],
    ["steps", String(stats.steps), "steps"],
    ["time", duration(stats.seconds), "time"],
  ];
  document.getElementById("facts").replaceChildren(
    ...facts.map(([name, value, id]) => element("div", {}, element("dt", {}, name), element("dd", { id: `fact-${id}` }, value))),
  );
}

/** What was done, in order. */
export function drawHistory(app) {
  const words = {
    fit: () => `Fitted to ${count(app.start.model.points, "point")}`,
    remove: (a) => `Removed ${listed(a.points)}`,
    relabel: (a) => `Relabelled ${listed(a.points)} as ${labelText(a.label)}`,
    step: () => "One more step",
    ridge: (a) => `Fitted with λ = ${number(a.ridge)}`,
  };
  const items = app.state.history.map((action) => {
    const bound = action.relative_bound === null ? "" : ` · ≤ ${percent(action.relative_bound)}`;
    return element("li", {}, words[action.what](action), element("span", { class: "small" }, `${duration(action.seconds)}${bound}`));
  });
  document.getElementById("history").replaceChildren(...items);
}
