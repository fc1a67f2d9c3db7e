// One sample, turn by turn, its tokens colored by values of the trainer and the engine.

import { COLORS } from "./charts.js";
import { ask, el, facts, number, select, short } from "./dom.js";
import { rewardLinks } from "./samples.js";
import { address, get, set } from "./state.js";

// Colors of a token: label, value of response token i, kind of scale. A token that no engine sampled has no log-prob of
// it, and a token that is not trained has no advantage.
const MEASURES = {
  difference: ["train − rollout log-prob", (s, i) => trained(s, i, minus(s.columns.log_probs?.[i], s.columns.rollout_log_probs?.[i])), "diverging"],
  advantage: ["advantage", (s, i) => trained(s, i, s.columns.advantages?.[i]), "diverging"],
  rollout: ["rollout log-prob", (s, i) => trained(s, i, s.columns.rollout_log_probs?.[i]), "falling"],
  train: ["train log-prob", (s, i) => s.columns.log_probs?.[i], "falling"],
  reference: ["train − reference log-prob", (s, i) => minus(s.columns.log_probs?.[i], s.columns.ref_log_probs?.[i]), "diverging"],
  entropy: ["entropy", (s, i) => s.columns.entropy?.[i], "rising"],
  value: ["value", (s, i) => s.columns.values?.[i], "diverging"],
  mask: ["loss mask", (s, i) => s.loss_mask[i], "rising"],
  version: ["weight version", (s, i) => s.versions[i], "category"],
};
export async function showSample(run, [kind, rollout, position]) {
  const place = document.getElementById("sample");
  try {
    draw(place, await ask("/api/sample", { run, kind, rollout, position }));
  } catch (error) {
    place.replaceChildren(el("p", { className: "empty" }, error.message));
  }
}

function draw(place, sample) {
  const usable = Object.entries(MEASURES).filter(([, [, value]]) => sample.loss_mask.some((_, i) => value(sample, i) !== undefined && value(sample, i) !== null));
  const chosen = get("color", "difference");
  const measure = usable.some(([name]) => name === chosen) ? chosen : usable[0]?.[0] ?? "mask";
  const pick = select(usable.map(([name, [label]]) => [name, label]), measure, (name) => set({ color: name }), { id: "measure" });
  const scale = makeScale(sample, measure);
  const head = el("div", { className: "head" },
    el("a", { href: address("samples") }, "‹ samples"),
    el("h2", {}, `${sample.kind === "eval" ? "evaluation" : "rollout"} ${sample.rollout}, sample ${sample.position}`),
    el("span", { className: `badge ${sample.status}` }, sample.status),
    el("label", { className: "scale" }, "color ", pick), legend(scale));
  const tip = el("div", { className: "tip", hidden: true });
  const turns = el("div", {}, ...makeTurns(sample, scale));
  turns.addEventListener("pointerover", (event) => explain(event, sample, tip));
  turns.addEventListener("pointerleave", () => { tip.hidden = true; });
  place.replaceChildren(head, el("div", { className: "columns" }, turns, side(sample)), tip);
}

function makeTurns(sample, scale) {
  const tokens = (from, to, isResponse) => Array.from({ length: to - from }, (_, k) => {
    const i = from + k, text = sample.texts[isResponse ? sample.num_prompt + i : i];
    const node = el("span", { className: "token" }, text);
    if (isResponse) {
      node.dataset.i = i;
      node.style.background = scale.color(MEASURES[scale.measure][1](sample, i));
      if (text === "\n") node.classList.add("break");
    }
    return node;
  });
  const turn = (className, role, nodes) => el("div", { className: `card turn ${className}` }, el("div", { className: "role" }, role), el("div", { className: "body" }, ...nodes));
  const turns = [turn("context", `prompt · ${sample.num_prompt} tokens`, tokens(0, sample.num_prompt, false))];
  for (let from = 0; from < sample.loss_mask.length;) {
    let to = from;
    while (to < sample.loss_mask.length && Boolean(sample.loss_mask[to]) === Boolean(sample.loss_mask[from])) to++;
    const version = sample.versions[from] === null ? "" : ` · weights ${sample.versions[from]}`;
    const [name, role] = sample.loss_mask[from] ? ["model", "model, trained"] : ["context", `${source(sample, from, to)}, not trained`];
    turns.push(turn(name, `${role} · ${to - from} tokens${version}`, tokens(from, to, true)));
    from = to;
  }
  return turns;
}

/** Who wrote tokens without loss. Rollout functions give log-prob 0 to tokens that no engine sampled. */
function source(sample, from, to) {
  const found = sample.columns.rollout_log_probs?.slice(from, to);
  if (!found) return "environment or earlier weights";
  return found.every((value) => value === 0) ? "environment" : "model";
}

function explain(event, sample, tip) {
  const token = event.target.closest?.("[data-i]");
  tip.hidden = !token;
  if (!token) return;
  const i = Number(token.dataset.i);
  const lines = Object.values(MEASURES).map(([label, value]) => [label, value(sample, i)]).filter(([, value]) => value !== undefined && value !== null);
  const text = JSON.stringify(sample.texts[sample.num_prompt + i]);
  tip.textContent = [`${text}  token ${i}, id ${sample.ids[sample.num_prompt + i]}`, ...lines.map(([label, value]) => `${label}  ${number(value)}`)].join("\n");
  const area = token.getBoundingClientRect();
  tip.style.left = `${Math.min(area.left, innerWidth - 300) + scrollX}px`;
  tip.style.top = `${area.bottom + scrollY + 4}px`;
}

function makeScale(sample, measure) {
  const [label, value, kind] = MEASURES[measure];
  const values = sample.loss_mask.map((_, i) => value(sample, i)).filter((v) => v !== undefined && v !== null);
  // not Math.max(...values): a call with as many arguments as a long response has tokens fails
  const top = values.reduce((most, v) => Math.max(most, Math.abs(v)), kind === "diverging" ? 1e-6 : 0) || 1;
  const names = [...new Set(values)];
  const color = (v) => {
    if (v === undefined || v === null) return "transparent";
    if (kind === "category") return `${COLORS[names.indexOf(v) % COLORS.length]}55`;
    const strength = Math.min(1, Math.abs(v) / top);
    const positive = kind === "diverging" ? v >= 0 : kind === "rising";
    return `rgb(${positive ? "47 158 110" : "208 69 60"} / ${(strength * 0.6).toFixed(3)})`;
  };
  return { label, measure, kind, top, names, color };
}

function legend(scale) {
  if (scale.kind === "category") return el("span", { className: "scale" }, `versions ${scale.names.join(", ")}`);
  const ramp = el("span", { className: "ramp" });
  const low = scale.kind === "rising" ? 0 : -scale.top, high = scale.kind === "falling" ? 0 : scale.top;
  ramp.style.background = `linear-gradient(90deg, ${scale.color(low)}, ${scale.color((low + high) / 2)}, ${scale.color(high)})`;
  return el("span", { className: "scale" }, number(low), ramp, number(high));
}

function side(sample) {
  const about = [
    ["reward", sample.reward], ["after normalization", sample.train_reward], ["label", short(sample.rest.label)],
    ["prompt", `${number(sample.prompt_tokens)} tokens`], ["response", `${number(sample.response_length)} tokens`],
    ["trained", `${number(sample.trained_tokens)} tokens`], ["weights", sample.weight_version || null], ["seconds", sample.seconds],
  ].map(([name, value]) => [name, value === null || value === undefined ? null : number(value)]);
  about.push(["sample index", sample.index === null ? null : String(sample.index)], ["group", sample.group_index === null ? null : String(sample.group_index)]);
  const cards = [el("div", { className: "card" }, el("h4", {}, "Sample"), facts(about))];
  if (sample.group.length > 1) {
    const mates = rewardLinks(sample.group, sample.rollout, sample.kind, sample.position);
    cards.push(el("div", { className: "card mates" }, el("h4", {}, "Rewards of its group"), ...mates));
  }
  if (sample.spans.length) cards.push(el("div", { className: "card" }, el("h4", {}, "What took the time"), ...spans(sample.spans)));
  const rest = Object.fromEntries(Object.entries(sample.rest).filter(([name, value]) => ["metadata", "reward", "train_metadata"].includes(name) && value && typeof value === "object" && Object.keys(value).length));
  if (Object.keys(rest).length) cards.push(el("div", { className: "card" }, el("h4", {}, "Metadata"), el("pre", {}, JSON.stringify(rest, null, 2))));
  return el("aside", { className: "side" }, ...cards);
}

function spans(list) {
  const end = Math.max(...list.map((span) => span.end)) || 1;
  return list.map((span) => {
    const bar = el("i");
    bar.style.left = `${span.start / end * 100}%`;
    bar.style.width = `${(span.end - span.start) / end * 100}%`;
    const name = el("span", { className: "name" }, span.name);
    name.style.paddingLeft = `${span.depth * 10}px`;
    return el("div", { className: "span", title: JSON.stringify(span.attrs) }, name, el("span", {}, `${(span.end - span.start).toFixed(3)} s`), el("span", { className: "bar" }, bar));
  });
}

function trained(sample, i, value) {
  return sample.loss_mask[i] ? value : undefined;
}

function minus(a, b) {
  return a === undefined || a === null || b === undefined || b === null ? undefined : a - b;
}
