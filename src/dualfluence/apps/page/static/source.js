// Where the numbers come from: the server that serves this page, or the page itself if it was saved.

const TOKEN = "dualfluence-token";
const VISIT = "dualfluence-visit"; // of this tab: its edits are its own

/** What answers the page's questions; `readOnly` where there is no model behind it. */
export function makeSource() {
  const content = document.getElementById("content").textContent.trim();
  return content ? savedSource(JSON.parse(content)) : serverSource(takeToken());
}

/** The token stands behind `#` in the printed link; it is taken out of the address bar. */
function takeToken() {
  const given = decodeURIComponent(location.hash.slice(1));
  if (given && !document.getElementById(given)) {
    sessionStorage.setItem(TOKEN, given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem(TOKEN) ?? "";
}

function serverSource(token) {
  async function ask(path, body) {
    const headers = { Authorization: `Bearer ${token}` };
    const visit = sessionStorage.getItem(VISIT);
    if (visit) headers.Visit = visit;
    const options = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) };
    let answer;
    try {
      answer = await fetch(`api/${path}`, options);
    } catch {
      throw new Error("The server does not answer. Is dualfluence explore still running?");
    }
    if (answer.status === 401) {
      throw new Error("This page needs the link that dualfluence explore printed: it carries a token.");
    }
    if (answer.ok) return answer;
    const error = new Error((await answer.json()).error);
    error.stale = answer.status === 409;
    error.gone = answer.status === 410;
    throw error;
  }
  const json = async (path, body) => (await ask(path, body)).json();
  async function begin() {
    const content = await json("start");
    sessionStorage.setItem(VISIT, content.visit);
    return content;
  }
  return {
    readOnly: false,
    begin,
    scores: async (version) => decoded(await json(`scores?version=${version}`)),
    groups: (version) => json(`groups?version=${version}`),
    certificate: () => json("certificate"),
    page: async () => (await ask("page")).text(),
    preview: (points) => json("preview", { points }),
    remove: (points) => json("remove", { points }),
    relabel: (points, label) => json("relabel", { points, label }),
    ridge: (ridge) => json("ridge", { ridge }),
    refine: () => json("refine", {}),
    undo: () => json("undo", {}),
    reset: () => json("reset", {}),
  };
}

function savedSource(content) {
  const scores = decoded(content.scores);
  return {
    readOnly: true,
    begin: async () => content,
    scores: async () => scores,
    groups: async () => content.groups,
    certificate: async () => content.certificate,
  };
}

/** Effects as rows of floats, one for each query. */
function decoded(scores) {
  const bytes = Uint8Array.from(atob(scores.effects), (c) => c.charCodeAt(0));
  const view = new DataView(bytes.buffer);
  const n = scores.own.length;
  const effects = [];
  for (let start = 0; start < bytes.length / 4; start += n) {
    effects.push(Float32Array.from({ length: n }, (_, i) => view.getFloat32(4 * (start + i), true)));
  }
  return { ...scores, effects };
}
