// The page: one state, drawn anew after every answer.

import { waitingFor } from "./busy.js";
import { element, hangSheets, labelText, offer, picture, pointCard } from "./cards.js";
import { colouring } from "./colours.js";
import { drawFinding } from "./findings.js";
import { count, duration, listed, number, percent, signed } from "./format.js";
import { TrainingMap } from "./map.js";
import { drawCertificate, drawHistory } from "./panels.js";
import { changedAnswers, drawAnswer, drawQueries, drawStrips, markQueries, notYet, summary } from "./query.js";
import { makeSource } from "./source.js";

const PATIENCE = 120; // milliseconds without a new selection before its effect is asked for
const MOST_CARDS = 12;

const at = (id) => document.getElementById(id);
const source = makeSource();
const app = {
  start: null, // map, pictures, what the model is
  first: null, // the state before any edit
  state: null,
  scores: null, // null while they are computed
  failed: false, // whether they could not be
  groups: null,
  preview: null, // what leaving the selection out would do
  query: 0,
  selected: new Set(),
  removed: new Set(),
  busy: false,
};
let map;
let waiting;

async function begin() {
  const content = await waitingFor("Fetching the model", source.begin());
  tellEnded(content.ended);
  app.start = content.start;
  app.first = content.first;
  hangSheets(app.start);
  if (app.start.heading) report(app.start.heading);
  at("main").hidden = false;
  at("readonly").hidden = !source.readOnly;
  at("why-not").hidden = !source.readOnly;
  at("limits").replaceChildren(...app.start.limits.map((text) => element("li", {}, text)));
  at("query-number").max = app.start.queries.labels.length - 1;
  map = new TrainingMap(at("map"), app.start.points.at, {
    onpick: pick,
    onhover: inspect,
    ondelete: () => at("remove").disabled || remove(),
    onclear: clear,
  });
  drawQueries(app, at("queries"), setQuery);
  fillGroups();
  at("label-place").replaceChildren(labelInput());
  fillRidges();
  listen();
  app.query = firstWrong(content.state);
  await take(content.state);
}

/** A report has its own heading and begins with what is worth a look. */
function report(heading) {
  document.title = at("heading").textContent = heading;
  document.body.classList.add("report");
  at("main").prepend(at("findings-panel"));
}

/** The first query that the model gets wrong is the one to ask about. */
function firstWrong(state) {
  if (app.start.kind === "number") return 0;
  const wrong = state.answers.findIndex((answer, q) => answer.indexOf(Math.max(...answer)) !== app.start.queries.labels[q]);
  return Math.max(0, wrong);
}

/** A new state of the model: draw what it says, then ask for its scores. */
async function take(state) {
  app.state = state;
  app.removed = new Set(state.removed);
  app.selected = new Set([...app.selected].filter((i) => !app.removed.has(i)));
  app.preview = app.groups = app.scores = null;
  app.failed = false;
  document.body.classList.add("stale");
  drawAll();
  drawStrips(app, pickCard);
  showFinding();
  drawPreview();
  askPreview();
  try {
    const asked = source.scores(state.version);
    const scores = await waitingFor("Leaving out every point in turn", asked);
    if (app.state !== state) return;
    app.scores = scores;
    document.body.classList.remove("stale");
    drawScores();
    await showFinding();
  } catch (error) {
    if (app.state !== state || error.stale) return;
    app.failed = true;
    drawStrips(app, pickCard);
    drawMap();
    showFinding();
    tell(error);
  }
}

/** An edit, with words for it: refused while another is under way, told if it is refused. */
async function act(words, ask) {
  if (app.busy || source.readOnly) return;
  app.busy = true;
  clearTimeout(waiting); // a preview of points that may be gone by then
  document.body.setAttribute("aria-busy", "true");
  enable();
  say(`${words} …`);
  try {
    const state = await waitingFor(words, ask());
    at("trouble").hidden = true;
    take(state);
    say(summary(app, state));
  } catch (error) {
    tell(error);
  } finally {
    app.busy = false;
    document.body.removeAttribute("aria-busy");
    enable();
  }
}

function tell(error) {
  if (error.gone) return tellEnded(error.message);
  at("trouble").textContent = error.message;
  at("trouble").hidden = false;
}

/** The server has dropped this visit, or an earlier one of this tab; stays until the page is loaded again. */
function tellEnded(words) {
  at("ended").textContent = words ? words.replace("Reload the page to start again.", app.start ? "$&" : "This page starts again.") : "";
  at("ended").hidden = !words;
}

const remove = () => act(`Removing ${count(app.selected.size, "point")}`, () => source.remove([...app.selected]));

function say(text) {
  at("status").textContent = text;
}

// Selection

/** Select points; `toggle` for one that is picked again. */
function pick(points, add, toggle = false) {
  const present = points.filter((i) => !app.removed.has(i));
  if (toggle && present.length === 1 && app.selected.has(present[0]) && (add || app.selected.size === 1)) {
    app.selected.delete(present[0]);
  } else {
    app.selected = new Set(add ? [...app.selected, ...present] : present);
  }
  say(`${count(app.selected.size, "point")} selected`);
  selectionChanged();
}

const pickCard = (i, event) => pick([i], event.shiftKey || app.selected.has(i) || event.detail === 0, true);

function clear() {
  app.selected = new Set();
  selectionChanged();
}

function selectionChanged() {
  app.preview = null;
  drawMap();
  drawSelection();
  drawPreview();
  drawAnswer(app);
  for (const card of document.querySelectorAll(".card[data-point]")) {
    card.setAttribute("aria-pressed", String(app.selected.has(Number(card.dataset.point))));
  }
  askPreview();
}

/** Ask what leaving the selection out would do, once the reader pauses. */
function askPreview() {
  clearTimeout(waiting);
  if (source.readOnly || !app.selected.size) return drawPreview();
  const points = [...app.selected];
  const current = () => app.selected.size === points.length && points.every((i) => app.selected.has(i));
  waiting = setTimeout(async () => {
    try {
      const preview = await source.preview(points);
      if (!current() || preview.version !== app.state.version) return;
      app.preview = preview;
      drawPreview();
      drawAnswer(app);
    } catch (error) {
      if (error.gone) tell(error);
      else if (current()) at("preview").textContent = error.message;
    }
  }, PATIENCE);
}

// Drawing

function drawAll() {
  const { model } = app.start;
  const size = model.parameters ? `, ${model.parameters.toLocaleString("en")} parameters` : "";
  const left = model.points - app.state.removed.length;
  const now = `${left.toLocaleString("en")} of ${count(model.points, "training point")}`;
  at("about").textContent =
    `${model.title}${size}, trained on ${now} of ${app.start.name}. ${capital(summary(app, app.state))}.` +
    app.start.notes.map((note) => ` ${note}`).join("");
  at("foot").textContent =
    `dualfluence ${app.start.version} · ${model.loss} · λ = ${number(app.state.ridge)} · ${model.dtype}` +
    (source.readOnly ? " · saved page" : " · served by dualfluence explore");
  markQueries(app, at("queries"));
  drawAnswer(app);
  drawMap();
  drawSelection();
  drawCertificate(app);
  drawHistory(app);
  if (!app.scores) at("how").textContent = "";
  at("ridge").value = String(app.state.ridge);
  enable();
}

function drawScores() {
  at("how").textContent = capital(app.scores.notes.join("; ")) + ".";
  drawStrips(app, pickCard);
  drawMap();
  drawPreview();
}

function drawMap() {
  const by = document.querySelector("input[name=colour]:checked").value;
  const { look, legend } = colouring(app, by);
  map.draw({
    labels: app.state.labels,
    kind: app.start.kind,
    look,
    selected: app.selected,
    removed: app.removed,
    relabelled: new Set(app.state.relabelled),
  });
  const [one, two] = app.start.points.share;
  at("legend").textContent =
    `${legend} Axes: the first two principal components of the kernel, ${percent(one)} and ${percent(two)} of its variance.`;
}

function inspect(i, spoken = false) {
  const place = at("inspector");
  place.hidden = i === null || i === undefined;
  if (place.hidden) return;
  const lines = [`label ${labelText(app.state.labels[i])}`];
  if (app.removed.has(i)) lines.push("removed");
  else if (app.scores) {
    if (app.scores.said) lines.push(`without it: ${app.scores.said[i]}`);
    lines.push(`effect ${signed(app.scores.effects[app.query][i])}`);
  }
  place.replaceChildren(
    picture(app.start.points, "points", i),
    element("span", {}, element("b", {}, `#${i}`), ...lines.map((line) => element("span", { class: "line" }, line))),
  );
  if (spoken) say(`point ${i}, ${lines.join(", ")}${app.selected.has(i) ? ", selected" : ""}`);
}

function drawSelection() {
  const points = [...app.selected];
  at("selection").classList.toggle("empty", !points.length);
  at("selected").textContent = points.length
    ? `${count(points.length, "point")} selected: ${listed(points)}`
    : "Nothing selected. Click a point, shift-click several, or draw around them.";
  const cards = points.slice(0, MOST_CARDS).map((i) =>
    pointCard(app.start, i, {
      top: labelText(app.state.labels[i]),
      pressed: true,
      title: `point ${i}: take it out of the selection`,
      onpick: () => pick([i], true, true),
    }),
  );
  at("selected-cards").replaceChildren(...cards);
  const said = app.scores?.said;
  if (points.length === 1 && said) at("label").value = said[points[0]]; // what it would be called without its label
  if (!points.length) at("preview").textContent = "";
  enable();
}

/** What leaving the selection out would do to the query, before anything is done. */
function drawPreview() {
  const points = [...app.selected];
  const place = at("preview");
  if (!points.length) return place.replaceChildren();
  const effects = app.scores?.effects[app.query];
  const sum = effects ? points.reduce((total, i) => total + effects[i], 0) : null;
  if (source.readOnly) return place.replaceChildren(...(effects ? savedPreview(points, sum) : []));
  if (!app.preview) return place.replaceChildren("Computing what leaving them out would do …");
  const change = app.preview.losses[app.query] - app.state.losses[app.query];
  const bound = app.preview.certificate.relative_bound;
  const changed = app.start.kind === "number" ? "" : ` ${changedAnswers(app.state, app.preview)} of ${count(app.state.losses.length, "answer")} would change.`;
  place.replaceChildren(
    `Without ${points.length === 1 ? "it" : "them"} the loss of query ${app.query} changes by `,
    element("b", {}, signed(change)),
    points.length > 1 && sum !== null ? ` (one by one: ${signed(sum)}).` : ".",
    changed,
    bound === null ? "" : ` Certified to ${percent(bound)}, in ${duration(app.preview.stats.seconds)}.`,
  );
}

/** A saved page knows single points and whole groups; of other sets it has the sum, and says so. */
function savedPreview(points, sum) {
  const loss = `the loss of query ${app.query} changes by `;
  const group = wholeGroup(points);
  if (points.length === 1) {
    const mean = -app.scores.harm[points[0]];
    return [`Without it ${loss}`, element("b", {}, signed(sum)), `, the mean loss of the queries by ${signed(mean)}.`];
  }
  if (group !== null && app.groups) {
    const value = app.groups.effects[app.query][group];
    return [`Without ${app.groups.names[group]} ${loss}`, element("b", {}, signed(value)), ` (one by one: ${signed(sum)}).`];
  }
  return ["One by one their effects on the loss add up to ", element("b", {}, signed(sum)), "; their joint effect needs the model."];
}

function wholeGroup(points) {
  if (!app.groups) return null;
  const found = app.groups.names.findIndex((name) => {
    const members = (app.start.groups[name] ?? []).filter((i) => !app.removed.has(i));
    return members.length === points.length && members.every((i) => app.selected.has(i));
  });
  return found < 0 ? null : found;
}

async function showFinding() {
  const which = document.querySelector("input[name=finding]:checked").value;
  const draw = () => drawFinding(app, which, app.groups, pickCard, selectGroup);
  if (!app.scores) {
    return at("finding").replaceChildren(notYet(app));
  }
  draw();
  if ((which !== "groups" && !source.readOnly) || app.groups) return;
  const state = app.state;
  const groups = await waitingFor("Leaving out each group", source.groups(state.version));
  if (app.state !== state) return;
  app.groups = groups;
  if (document.querySelector("input[name=finding]:checked").value === which) draw();
  if (source.readOnly) drawPreview();
}

// Controls

function enable() {
  const off = app.busy || source.readOnly;
  const some = app.selected.size > 0;
  at("remove").disabled = at("relabel").disabled = off || !some;
  at("clear").disabled = !some;
  at("undo").disabled = at("reset").disabled = off || app.state.history.length < 2;
  at("refine").disabled = at("ridge").disabled = off;
  at("save").hidden = source.readOnly;
  at("relabel").hidden = Array.isArray(app.first.labels[0]);
  at("label-place").hidden = at("relabel").hidden;
}

function labelInput() {
  if (app.start.kind === "number") {
    return element("input", { id: "label", type: "number", step: "any", value: "0", "aria-label": "new target" });
  }
  const options = app.start.classes.map((name, k) => element("option", { value: k }, name));
  return element("select", { id: "label", "aria-label": "new label" }, ...options);
}

function fillRidges() {
  const { ridges } = app.start;
  at("ridge-place").hidden = at("ridge-words").hidden = source.readOnly || !ridges.length;
  const one = (ridge) => element("option", { value: String(ridge) }, number(ridge));
  at("ridge").replaceChildren(...ridges.map(one));
}

function fillGroups() {
  const names = Object.keys(app.start.groups);
  const first = element("option", { value: "" }, names.length ? "…" : "none");
  at("group").replaceChildren(first, ...names.map((name) => element("option", { value: name }, name)));
  at("group").disabled = !names.length;
}

function selectGroup(name) {
  pick(app.start.groups[name], false);
}

function setQuery(q) {
  app.query = q;
  markQueries(app, at("queries"));
  const strip = at("queries");
  const frame = strip.children[q];
  strip.scrollTo({ left: frame.offsetLeft - strip.clientWidth / 2 + frame.clientWidth / 2 });
  drawAnswer(app);
  if (app.scores) drawScores();
  else drawPreview();
  say(frame.getAttribute("aria-label"));
}

function listen() {
  const click = (id, work) => at(id).addEventListener("click", work);
  click("remove", remove);
  click("relabel", () => {
    const words = `Relabelling ${count(app.selected.size, "point")}`;
    act(words, () => source.relabel([...app.selected], Number(at("label").value)));
  });
  click("refine", () => act("Taking a step", source.refine));
  click("undo", () => act("Going back", source.undo));
  click("reset", () => act("Going back to the first model", source.reset));
  at("ridge").addEventListener("change", async (event) => {
    const ridge = Number(event.target.value);
    await act(`Fitting with λ = ${number(ridge)}`, () => source.ridge(ridge));
    at("ridge").value = String(app.state.ridge); // as it was, where that was refused
  });
  click("clear", clear);
  click("download", async () => {
    const document = await source.certificate().catch(tell);
    if (document) offer("certificate.json", JSON.stringify(document, null, 2), "application/json");
  });
  click("save", async () => {
    at("save").disabled = true;
    const page = await waitingFor("Writing the page", source.page()).catch(tell);
    at("save").disabled = false;
    if (page) offer("dualfluence-explore.html", page, "text/html");
  });
  at("query-number").addEventListener("change", (event) => {
    const q = Number(event.target.value);
    if (Number.isInteger(q) && q >= 0 && q < app.start.queries.labels.length) setQuery(q);
    else event.target.value = app.query;
  });
  at("colours").addEventListener("change", drawMap);
  at("findings-choice").addEventListener("change", () => showFinding().catch(tell));
  at("lasso").addEventListener("change", (event) => {
    map.lassoOnTouch = event.target.checked;
    at("map").classList.toggle("lasso", event.target.checked);
  });
  at("group").addEventListener("change", (event) => {
    if (event.target.value) selectGroup(event.target.value);
    event.target.value = "";
  });
}

function capital(text) {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

begin().catch((error) => {
  at("about").textContent = "";
  tell(error);
});
