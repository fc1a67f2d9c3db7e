// The overview and the page of all metrics: groups of curves and their order.

import { barChart, lineChart } from "./charts.js";
import { el, number } from "./dom.js";

const TILES = [
  ["rollout", null],
  ["reward", ["rollout/raw_reward", "rollout/rewards"]],
  ["response length", ["rollout/response_len/mean"]],
  ["truncated", ["rollout/truncated_ratio"]],
  ["|train − rollout| log-prob", ["train/train_rollout_logprob_abs_diff"]],
  ["time of a step", ["perf/step_time"]],
  ["tokens", ["perf/tokens_per_gpu_per_sec"]],
];

// Units and meanings of the metrics come with their values, from the table of metrics.
const CHARTS = [
  ["Reward", ["rollout/raw_reward"]],
  ["Response length", ["rollout/response_len/mean", "rollout/response_len/median", "rollout/response_len/max"]],
  ["Loss", ["train/loss", "train/pg_loss", "train/kl_loss", "train/value_loss"]],
  ["Gradient norm", ["train/grad_norm"]],
  ["Log-prob difference of trainer and engine", ["train/train_rollout_logprob_abs_diff", "rollout/logprob_abs_diff_max"]],
  ["KL of this update", ["train/ppo_kl"]],
  ["Entropy", ["train/entropy_loss"]],
  ["Clipped tokens", ["train/pg_clipfrac"]],
  ["Truncated responses", ["rollout/truncated_ratio", "rollout/repetition_frac"]],
  ["Weight version lag", ["rollout/weight_version_lag", "rollout/weight_version_lag/max"]],
  ["Tokens per second", ["perf/tokens_per_gpu_per_sec", "perf/actor_train_tok_per_s"]],
  ["Learning rate", ["train/lr-pg_0"]],
];

const PHASES = [
  ["generation", "perf/rollout_time"], ["reference log-probs", "perf/ref_log_probs_time"],
  ["teacher log-probs", "perf/teacher_log_probs_time"], ["log-probs", "perf/log_probs_time"],
  ["training", "perf/actor_train_time"], ["weights to engines", "perf/update_weights_time"], ["checkpoint", "perf/save_model_time"],
];

const AXES = { "train/step": "step", "rollout/step": "rollout", "eval/step": "after rollout" };

export function showOverview(all) {
  document.getElementById("tiles").replaceChildren(...TILES.map((tile) => makeTile(all, tile)).filter(Boolean));
  const phases = PHASES.filter(([, name]) => all[name]).map(([label, name]) => ({ label, x: all[name].x, y: all[name].y }));
  const charts = [...CHARTS.map(([title, names]) => makeChart(all, title, names)), ...evaluations(all)];
  const bars = phases.length ? barChart("Where the time of a step goes", "s", phases, "rollout") : null;
  const shown = charts.filter(Boolean);
  if (bars) shown.splice(2, 0, bars);
  document.getElementById("overview-charts").replaceChildren(...shown.length ? shown : [el("p", { className: "empty" }, "No metrics yet: the first rollout is under way.")]);
}

let watcher = null;

/** Every metric; a chart is drawn when it scrolls into view. */
export function showMetrics(all, filter) {
  const place = document.getElementById("metric-charts");
  watcher?.disconnect();
  watcher = new IntersectionObserver((entries) => {
    for (const { isIntersecting, target } of entries) {
      if (!isIntersecting) continue;
      watcher.unobserve(target);
      target.replaceWith(makeChart(all, target.dataset.name, [target.dataset.name]) ?? el("span"));
    }
  }, { rootMargin: "300px" });
  const names = Object.keys(all).filter((name) => name.toLowerCase().includes(filter.toLowerCase()));
  place.replaceChildren(...names.map((name) => {
    const box = el("div", { className: "card chart" });
    box.dataset.name = name;
    watcher.observe(box);
    return box;
  }));
  if (!names.length) place.append(el("p", { className: "empty" }, "No metric has that in its name."));
}

function makeChart(all, title, names) {
  const found = names.filter((name) => all[name]);
  if (!found.length) return null;
  const series = found.map((name) => ({ label: shorten(name), x: all[name].x, y: all[name].y }));
  const { axis, unit, meaning } = all[found[0]];
  return lineChart(title, unit, series, AXES[axis] ?? "step", meaning);
}

function evaluations(all) {
  const sets = Object.keys(all).filter((name) => /^eval\/[^/]+$/.test(name) && !name.endsWith("-truncated_ratio"));
  return sets.map((name) => makeChart(all, `Evaluation: ${name.slice(5)}`, [name]));
}

function shorten(name) {
  return name.replace(/^(train|rollout|perf)\//, "").replace("response_len/", "");
}

function makeTile(all, [name, metrics]) {
  let value = null, unit = "";
  if (metrics === null) {
    value = Math.max(-1, ...Object.values(all).filter((s) => s.axis === "rollout/step").map((s) => s.x[s.x.length - 1]));
    if (value < 0) return null;
  } else {
    const metric = metrics.find((candidate) => all[candidate]);
    if (!metric) return null;
    value = all[metric].y[all[metric].y.length - 1];
    unit = all[metric].unit === "share" ? "" : all[metric].unit;
  }
  const text = el("div", { className: "value" }, number(value), unit ? el("small", {}, unit) : null);
  return el("div", { className: "tile" }, el("div", { className: "name" }, name), text);
}
