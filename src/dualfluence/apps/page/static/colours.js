// What a point looks like on the map, by what the reader wants to see.

const CLASS_COLOURS = 10; // colours in the style sheet; the label itself is written on the map

/** Colour and size of every point, and what they mean. Size says the same as colour. */
export function colouring(app, by) {
  if (by === "label" && app.start.kind !== "number") {
    const look = (i) => ({ fill: `var(--class-${app.state.labels[i] % CLASS_COLOURS})`, size: 1 });
    return { look, legend: "Each point is written as its label." };
  }
  if (by === "label") {
    const values = app.state.labels.map((label) => (Array.isArray(label) ? label[0] : label));
    return { look: scaled(values), legend: "Larger and warmer: a larger target." };
  }
  if (!app.scores) {
    const legend = app.failed ? "Not computed." : "Computing: each point is left out in turn.";
    return { look: () => ({ fill: "var(--quiet)", size: 1 }), legend };
  }
  if (by === "effect") {
    const effects = app.scores.effects[app.query];
    const most = Math.max(...effects.map(Math.abs), 1e-30);
    const look = (i) => {
      const share = Math.sqrt(Math.abs(effects[i]) / most);
      const end = effects[i] >= 0 ? "--helpful" : "--harmful";
      return { fill: `color-mix(in oklab, var(${end}) ${100 * share}%, var(--quiet))`, size: 0.75 + 0.75 * share };
    };
    return { look, legend: `Blue helps query ${app.query}, orange harms it; larger is stronger.` };
  }
  const words = {
    own: "Larger and warmer: more self-influence; only the point itself supports its label.",
    without: "Larger and warmer: a higher loss under the model trained without the point.",
  };
  return { look: scaled(app.scores[by]), legend: words[by] };
}

function scaled(values) {
  const low = Math.min(...values);
  const high = Math.max(...values);
  return (i) => {
    const share = high > low ? Math.sqrt((values[i] - low) / (high - low)) : 0;
    return { fill: `color-mix(in oklab, var(--high) ${100 * share}%, var(--low))`, size: 0.8 + 0.6 * share };
  };
}
