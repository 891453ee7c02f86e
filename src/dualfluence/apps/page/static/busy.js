// What is being computed, in words, while the reader waits.

const SHORT = 150; // milliseconds that nobody takes for waiting
const running = [];

/** Show `words` while `promise` is under way, with the seconds so far; returns what it gives. */
export async function waitingFor(words, promise) {
  const task = { words, since: performance.now() };
  running.push(task);
  const shown = setTimeout(drawRunning, SHORT);
  const beats = setInterval(drawRunning, 1000);
  try {
    return await promise;
  } finally {
    clearTimeout(shown);
    clearInterval(beats);
    running.splice(running.indexOf(task), 1);
    drawRunning();
  }
}

function drawRunning() {
  const place = document.getElementById("working");
  const waited = performance.now();
  const long = running.filter((task) => waited - task.since >= SHORT);
  place.hidden = !long.length;
  const seconds = (task) => Math.floor((waited - task.since) / 1000);
  const lines = long.map((task) => `${task.words} …${seconds(task) ? ` ${seconds(task)} s` : ""}`);
  if (place.textContent !== lines.join(" ")) place.textContent = lines.join(" ");
}
