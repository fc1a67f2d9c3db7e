// Which page is shown, and the clock that keeps it up to date.

import { COLORS } from "./charts.js";
import { controls, makeView, progressOf, showMetrics, showOverview } from "./curves.js";
import { ask, el } from "./dom.js";
import { showRun, showRuns, stateBadge } from "./runs.js";
import { showSample } from "./sample.js";
import { showSamples } from "./samples.js";
import { address, get, getAll, onChange, path, set } from "./state.js";

const INTERVAL_MS = 3000;
const THEMES = { "": "system", light: "light", dark: "dark" };
let runs = null; // summaries, the newest first
const loaded = new Map(); // name of a run: {key, info, curves}
let shown = ""; // a redraw only if something changed: it would end a drag or close a list

async function refresh() {
  let answer;
  try {
    answer = await ask("/api/runs");
  } catch {
    document.getElementById("run-state").replaceChildren(el("span", { className: "badge failed" }, "the board's server is gone"));
    return;
  }
  runs = answer.runs;
  await load();
}

/** Names of the runs in the address that exist; without one the newest run. */
function chosen() {
  const names = getAll("run").filter((name) => runs.some((run) => run.name === name));
  return names.length ? names : [runs[0].name];
}

function summaryOf(name) {
  return runs.find((run) => run.name === name);
}

async function load() {
  const x = get("x", "rollout");
  await Promise.all(chosen().map(async (name) => {
    const key = `${summaryOf(name).version} ${x}`;
    if (loaded.get(name)?.key === key) return;
    const [info, curves] = await Promise.all([ask("/api/run", { run: name }), ask("/api/metrics", { run: name, x })]);
    loaded.set(name, { key, info, curves });
  }));
  show();
}

function show() {
  const names = chosen();
  // The address may have changed during a request. Its own load() shows it.
  if (names.some((name) => !loaded.get(name)?.key.endsWith(` ${get("x", "rollout")}`))) return;
  const main = summaryOf(names[0]);
  document.title = `${names.join(", ")} · slime board`;
  document.getElementById("run-name").textContent = names.length > 1 ? `${names[0]} + ${names.length - 1}` : names[0];
  document.getElementById("run-state").replaceChildren(stateBadge(main), ` ${progressOf(main).filter(Boolean).join(" · ")}`);
  const [tab, ...place] = path();
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== tab;
  for (const link of document.querySelectorAll("nav a")) {
    link.classList.toggle("here", link.dataset.tab === (tab === "sample" ? "samples" : tab));
    link.href = address(link.dataset.tab);
    if (link.dataset.tab === "runs") link.hidden = runs.length < 2;
  }
  if (tab === "runs") showRuns(runs, names);
  const now = JSON.stringify([location.hash, names.map((name) => loaded.get(name).key), tab === "run" ? main : main.done]);
  if (now !== shown) showTab(tab, place, names);
  shown = now;
  // Charts are drawn once they have a size, and then painted: the next task is after both.
  requestAnimationFrame(() => setTimeout(() => { document.body.dataset.painted ??= String(Math.round(performance.now())); }));
}

function showTab(tab, place, names) {
  const { info } = loaded.get(names[0]);
  if (tab === "overview" || tab === "metrics") {
    const view = makeView(names.map((name, i) => ({ name, color: COLORS[i % COLORS.length], summary: summaryOf(name), curves: loaded.get(name).curves })));
    document.getElementById(`${tab}-controls`).replaceChildren(...controls(runs.map((run) => run.name), view));
    if (tab === "overview") showOverview(view);
    else showMetrics(view);
  }
  if (tab === "samples") showSamples(names[0], info);
  if (tab === "sample") showSample(names[0], place);
  if (tab === "run") showRun(summaryOf(names[0]), info);
}

function bindSearch(id, name) {
  const field = document.getElementById(id);
  field.value = get(name);
  field.addEventListener("input", () => set({ [name]: field.value }));
}

function showTheme() {
  document.getElementById("theme").textContent = `theme: ${THEMES[document.documentElement.dataset.theme ?? ""]}`;
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement, names = Object.keys(THEMES);
  const next = names[(names.indexOf(root.dataset.theme ?? "") + 1) % names.length];
  if (next) { root.dataset.theme = next; localStorage.setItem("theme", next); }
  else { delete root.dataset.theme; localStorage.removeItem("theme"); }
  showTheme();
});
showTheme();
bindSearch("metric-filter", "find");
bindSearch("setting-filter", "setting");
onChange(() => { if (runs) load(); });
await refresh();
setInterval(refresh, INTERVAL_MS);
