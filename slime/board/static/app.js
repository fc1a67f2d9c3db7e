// Which page is shown, and the clock that keeps it up to date.

import { showMetrics, showOverview } from "./curves.js";
import { ask, el } from "./dom.js";
import { showSample } from "./sample.js";
import { showSamples } from "./samples.js";

const INTERVAL_MS = 3000;
let run = null;
let curves = {};
let version = -1;

async function refresh() {
  try {
    run = await ask("/api/run");
  } catch {
    document.getElementById("run-state").textContent = "the board's server is gone";
    document.getElementById("run-state").className = "state";
    return;
  }
  document.title = `${run.name} · slime board`;
  document.getElementById("run-name").textContent = run.name;
  const state = document.getElementById("run-state");
  state.textContent = run.is_live ? "live" : `last change ${ago(run.age_s)} ago`;
  state.className = run.is_live ? "state live" : "state";
  if (run.version !== version) {
    curves = await ask("/api/metrics");
    version = run.version;
    show();
  }
}

function show() {
  const [tab, ...path] = (location.hash.slice(1) || "overview").split("/");
  for (const section of document.querySelectorAll("main > section")) section.hidden = section.id !== tab;
  for (const link of document.querySelectorAll("nav a")) link.classList.toggle("here", link.dataset.tab === (tab === "sample" ? "samples" : tab));
  if (tab === "overview") showOverview(curves);
  if (tab === "metrics") showMetrics(curves, document.getElementById("metric-filter").value);
  if (tab === "samples") showSamples(run);
  if (tab === "sample") showSample(path);
  if (tab === "run") showRun();
  document.body.dataset.painted = String(Math.round(performance.now()));
}

function showRun() {
  const facts = [["folder", run.folder], ["model", run.model], ["started", new Date(run.started * 1000).toLocaleString()], ["recorded rollouts", run.rollouts.length]];
  const words = run.argv.reduce((lines, word) => { if (word.startsWith("--") || !lines.length) lines.push(word); else lines[lines.length - 1] += ` ${word}`; return lines; }, []);
  document.getElementById("run").replaceChildren(
    el("div", { className: "card" }, el("dl", { className: "facts" }, ...facts.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value ?? "–"))]))),
    el("div", { className: "card" }, el("pre", {}, [`python ${run.driver}`, ...words].join(" \\\n  "))));
}

function ago(seconds) {
  const units = [[86400, "days"], [3600, "hours"], [60, "minutes"]];
  const [size, name] = units.find(([size]) => seconds >= 2 * size) ?? [1, "seconds"];
  return `${Math.floor(seconds / size)} ${name}`;
}

addEventListener("hashchange", () => { if (run) show(); });
document.getElementById("metric-filter").addEventListener("input", show);
await refresh();
setInterval(refresh, INTERVAL_MS);
