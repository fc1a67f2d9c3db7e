// The overview and the page of all metrics: groups of curves, their order, and the controls above them.

import { chart, COLORS } from "./charts.js";
import { duration, el, number, select, swatch } from "./dom.js";
import { get, getAll, set } from "./state.js";

// Title, metrics, and the least extent of the y axis: below it are rounding errors.
const CHARTS = [
  ["Reward", ["rollout/raw_reward"]],
  ["Response length", ["rollout/response_len/mean", "rollout/response_len/median", "rollout/response_len/max"]],
  ["Loss", ["train/loss", "train/pg_loss", "train/kl_loss", "train/value_loss"], 1e-6],
  ["Gradient norm", ["train/grad_norm"]],
  ["Log-prob difference of trainer and engine", ["train/train_rollout_logprob_abs_diff", "rollout/logprob_abs_diff_max"]],
  ["KL of this update", ["train/ppo_kl"], 1e-6],
  ["Entropy", ["train/entropy_loss"]],
  ["Clipped tokens", ["train/pg_clipfrac"]],
  ["Truncated and repetitive responses", ["rollout/truncated_ratio", "rollout/repetition_frac"]],
  ["Weight version lag", ["rollout/weight_version_lag", "rollout/weight_version_lag/max"]],
  ["Tokens per second", ["perf/tokens_per_gpu_per_sec", "perf/actor_train_tok_per_s"]],
  ["Learning rate", ["train/lr-pg_0"]],
];

const PHASES = [
  ["generation", "perf/rollout_time"], ["reference log-probs", "perf/ref_log_probs_time"],
  ["teacher log-probs", "perf/teacher_log_probs_time"], ["log-probs", "perf/log_probs_time"],
  ["training", "perf/actor_train_time"], ["weights to engines", "perf/update_weights_time"], ["checkpoint", "perf/save_model_time"],
];

const TIMES = [["hours", 3600], ["minutes", 60], ["seconds", 1]];

/** What all charts of the page share. runs: [{name, color, summary, curves}], the first one is the main one. */
export function makeView(runs) {
  const x = get("x", "rollout");
  const longest = Math.max(0, ...runs.flatMap((run) => Object.values(run.curves).map((s) => s.x[s.x.length - 1])));
  const [unit, size] = x === "time" ? TIMES.find(([, size]) => longest >= 3 * size) ?? TIMES[2] : [null, 1];
  const curves = (all) => Object.fromEntries(Object.entries(all).map(([name, s]) => [name, { ...s, x: s.x.map((at) => at / size) }]));
  const axis = { rollout: "rollout", step: "optimizer step", time: `${unit} since the start`, tokens: "response tokens trained on" }[x];
  const zoom = get("zoom").split(":").map(Number);
  return {
    runs: unit === null ? runs : runs.map((run) => ({ ...run, curves: curves(run.curves) })),
    axis, isWhole: x !== "time",
    zoom: zoom.length === 2 && zoom[0] < zoom[1] ? zoom : null,
  };
}

export function controls(names, view) {
  const smooth = Number(get("smooth", "0"));
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: smooth, "aria-label": "smoothing" });
  slider.addEventListener("change", () => set({ smooth: Number(slider.value) ? slider.value : "" }));
  const others = names.filter((name) => !view.runs.some((run) => run.name === name));
  const chosen = view.runs.map((run) => run.name);
  const chips = view.runs.map((run) => el("button", { className: "chip", title: "remove from the comparison", disabled: chosen.length === 1, onclick: () => set({ run: chosen.filter((name) => name !== run.name) }) }, swatch(run.color), run.name, chosen.length > 1 ? " ×" : ""));
  return [
    ...names.length > 1 ? chips : [],
    others.length ? select([["", "compare with …"], ...others.map((name) => [name, name])], "", (name) => set({ run: [...chosen, name], zoom: "" }), { "aria-label": "compare with" }) : null,
    el("label", {}, "x ", select([["rollout", "rollout"], ["step", "optimizer step"], ["time", "time"], ["tokens", "tokens"]], get("x", "rollout"), (x) => set({ x: x === "rollout" ? "" : x, zoom: "" }))),
    el("label", {}, "smooth ", slider, smooth ? smooth.toFixed(2) : "off"),
    view.zoom ? el("button", { onclick: () => set({ zoom: "" }) }, "whole range") : null,
    el("a", { href: csv(view, []), download: "metrics.csv" }, "all as CSV"),
  ].filter(Boolean);
}

function csv(view, names) {
  return `/api/metrics.csv?${new URLSearchParams([...view.runs.map((run) => ["run", run.name]), ...names.map((name) => ["name", name])])}`;
}

export function showOverview(view) {
  const [main] = view.runs;
  document.getElementById("tiles").replaceChildren(...tiles(main));
  const [reward, ...others] = CHARTS;
  const charts = [reward, ...evaluations(view.runs), ...others].map((item) => metricChart(view, ...item)).filter(Boolean);
  const phases = PHASES.filter(([, name]) => main.curves[name]);
  if (view.runs.length > 1) charts.push(metricChart(view, "Time of a step", ["perf/step_time"]));
  else if (phases.length) charts.splice(2, 0, phaseChart(view, main, phases));
  const none = el("p", { className: "empty" }, "No metrics yet: the first rollout is under way.");
  document.getElementById("overview-charts").replaceChildren(...charts.some(Boolean) ? charts.filter(Boolean) : [none]);
}

let watcher = null;

/** Every metric; a chart is drawn when it scrolls into view. */
export function showMetrics(view) {
  const place = document.getElementById("metric-charts"), filter = get("find").toLowerCase();
  watcher?.disconnect();
  watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      target.replaceWith(metricChart(view, target.dataset.name, [target.dataset.name]) ?? el("span"));
    }
  }, { rootMargin: "300px" });
  const names = [...new Set(view.runs.flatMap((run) => Object.keys(run.curves)))].sort();
  const boxes = names.filter((name) => name.toLowerCase().includes(filter)).map((name) => {
    const box = el("div", { className: "card chart" });
    box.dataset.name = name;
    watcher.observe(box);
    return box;
  });
  place.replaceChildren(...boxes.length ? boxes : [el("p", { className: "empty" }, "No metric has that in its name.")]);
}

function metricChart(view, title, names, floor = 0) {
  const present = names.filter((name) => view.runs.some((run) => run.curves[name]));
  if (!present.length) return null;
  const isComparison = view.runs.length > 1;
  // Each run has one color, so a comparison shows the first of several metrics.
  const shown = isComparison ? present.slice(0, 1) : present;
  const series = isComparison
    ? view.runs.filter((run) => run.curves[shown[0]]).map((run) => ({ label: run.name, color: run.color, ...run.curves[shown[0]] }))
    : distinct(shown.map((name, i) => ({ label: shorten(name), color: COLORS[i % COLORS.length], ...view.runs[0].curves[name] })));
  const { unit, meaning } = series[0];
  const isLog = getAll("log").includes(title);
  const last = series.length === 1 ? number(series[0].y.findLast((y) => y !== null)) : "";
  const toggle = () => set({ log: isLog ? getAll("log").filter((item) => item !== title) : [...getAll("log"), title] });
  const tools = [
    el("button", { className: `tool ${isLog ? "on" : ""}`, onclick: toggle, title: "logarithmic y axis", "aria-pressed": String(isLog) }, "log"),
    el("a", { className: "tool", href: csv(view, shown), download: `${title}.csv`, title: "all points of this chart" }, "csv"),
  ];
  const heading = isComparison && shown[0].endsWith("/mean") ? `${title}, mean` : title;
  return chart({ ...shared(view), title: heading, meaning, unit, series, note: last, tools, isLog, floor, smooth: Number(get("smooth", "0")), hidesLegend: isComparison });
}

function phaseChart(view, run, phases) {
  const series = phases.map(([label, name], i) => ({ label, color: COLORS[i], ...run.curves[name] }));
  return chart({ ...shared(view), title: "Where the time of a step goes", unit: "s", series, bars: true });
}

function shared(view) {
  return { axis: view.axis, isWhole: view.isWhole, zoom: view.zoom, onZoom: (range) => set({ zoom: range === null ? "" : range.map((x) => Number(x.toPrecision(5))).join(":") }) };
}

/** Equal curves lie on each other: they become one, with both names. */
function distinct(series) {
  const found = [];
  for (const item of series) {
    const same = found.find((other) => other.y.length === item.y.length && other.y.every((y, i) => y === item.y[i]));
    if (same) same.label += ` = ${item.label}`;
    else found.push(item);
  }
  return found;
}

/** Title and metrics of each evaluated data set: its score, then its pass rates. */
function evaluations(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))];
  return evalSets(names).map((name) => [`Evaluation: ${name.slice(5)}`, [name, ...names.filter((other) => other.startsWith(`${name}-pass@`))]]);
}

/** Names of the scores among the metrics of evaluations: eval/NAME, without eval/NAME-truncated_ratio and others. */
export function evalSets(names) {
  const plain = names.filter((name) => /^eval\/[^/]+$/.test(name) && !["eval/weight_version", "eval/step"].includes(name));
  return plain.filter((name) => !plain.some((other) => name.startsWith(`${other}-`)));
}

function shorten(name) {
  return name.replace(/^(train|rollout|perf|eval)\//, "").replace("response_len/", "");
}

/** "13 of 30", and the time until the end. */
export function progressOf(run) {
  const text = run.num_rollout ? `${number(run.done)} of ${number(run.num_rollout)}` : number(run.done);
  return [text, run.left_s === null ? "" : `${duration(run.left_s)} left`];
}

function tiles(run) {
  const found = [["rollouts", ...progressOf(run.summary)]];
  const best = (s) => {
    const at = s.y.reduce((best, y, i) => y !== null && (best === null || y > s.y[best]) ? i : best, null);
    return at === null ? "" : `best ${number(s.y[at])}${get("x", "rollout") === "rollout" ? ` at ${s.x[at]}` : ""}`;
  };
  const add = (label, name, note) => {
    const s = run.curves[name];
    if (s) found.push([label, number(s.y.findLast((y) => y !== null)), note ? note(s) : s.unit === "share" ? "" : s.unit]);
  };
  add("reward", "rollout/raw_reward", best);
  for (const name of evalSets(Object.keys(run.curves)).slice(0, 3)) add(`eval ${name.slice(5)}`, name, best);
  add("response length", "rollout/response_len/mean");
  add("truncated", "rollout/truncated_ratio");
  add("|train − rollout| log-prob", "train/train_rollout_logprob_abs_diff");
  add("time of a step", "perf/step_time");
  add("tokens", "perf/tokens_per_gpu_per_sec");
  return found.map(([label, value, note]) => el("div", { className: "tile" }, el("div", { className: "name" }, label), el("div", { className: "value" }, value, note ? el("small", {}, note) : null)));
}
