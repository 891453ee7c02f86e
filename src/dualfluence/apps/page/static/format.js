// Numbers as a reader wants them.

const SUPERSCRIPT = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

/** `digits` significant digits, powers of ten where zeros would have to be counted. */
export function number(value, digits = 3) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e-3 && size < 1e5) return String(Number(value.toPrecision(digits))).replace("-", "−");
  const [mantissa, power] = value.toExponential(digits - 1).split("e");
  const raised = [...String(Number(power))].map((c) => SUPERSCRIPT[c]).join("");
  return `${String(Number(mantissa)).replace("-", "−")} × 10${raised}`;
}

/** A feature in a few characters. */
export function compact(value) {
  const size = Math.abs(value);
  const text = size >= 1000 ? value.toExponential(0) : value.toFixed(size >= 10 ? 1 : 2);
  return text.replace("-", "−");
}

/** A change, with its sign. */
export function signed(value, digits = 2) {
  return (value > 0 ? "+" : "") + number(value, digits);
}

/** A share as a percentage. */
export function percent(share, digits = 2) {
  return `${number(100 * share, digits)} %`;
}

/** A probability as a percentage with one digit behind the point. */
export function probability(p) {
  const value = 100 * p;
  if (value > 0 && value < 0.05) return "< 0.1 %";
  return `${value.toFixed(1)} %`;
}

/** Wall time. */
export function duration(seconds) {
  return seconds < 1 ? `${Math.max(1, Math.round(1000 * seconds))} ms` : `${seconds.toFixed(1)} s`;
}

/** `3 points`, `1 point`. */
export function count(n, word) {
  return `${n.toLocaleString("en")} ${word}${n === 1 ? "" : "s"}`;
}

/** `#3, #17, #20 and 9 more`. */
export function listed(points, most = 5) {
  const shown = points.slice(0, most).map((p) => `#${p}`).join(", ");
  return points.length > most ? `${shown} and ${points.length - most} more` : shown;
}
