// The table of samples or of groups, and its filters.

import { ask, el, number, select, short } from "./dom.js";
import { address, get, set } from "./state.js";

// Column, heading, class. Columns with the class "minor" are hidden on narrow screens.
const SAMPLES = [
  ["rollout", "rollout", "id"], ["position", "sample", "id"], ["group_index", "group", "id minor"], ["status", "status", "minor"], ["reward", "reward", "num"],
  ["prompt", "prompt", "text"], ["snippet", "response", "text"], ["label", "label", "text"],
  ["response_length", "tokens", "num"], ["prompt_tokens", "prompt tokens", "num minor"], ["trained_tokens", "trained", "num minor"],
  ["weight_version", "weights", "num minor"], ["seconds", "seconds", "num minor"],
];
const GROUPS = [
  ["rollout", "rollout", "id"], ["group_index", "group", "id"], ["prompt", "prompt", "text"], ["label", "label", "text"], ["reward", "mean reward", "num minor"],
  ["spread", "spread", "num minor"], ["rewards", "rewards", "rewards"], ["response_length", "mean tokens", "num minor"], ["seconds", "mean seconds", "num minor"],
];
const UNSORTED = ["prompt", "label", "rewards"];
const FILTERS = ["kind", "rollout", "status", "min_reward", "max_reward", "min_length", "max_length", "group", "text", "by_group"];
const PAGE = 50;
const PAUSE_MS = 250; // between the last key and the question: a search may read every file

let built = ""; // what the options of the filters were made for
let newest = 0; // answers may overtake each other: only that of the last question is shown
let wait = null;

export async function showSamples(run, info) {
  const kind = get("kind", "rollout");
  const options = JSON.stringify([run, kind, info[kind]]);
  if (options !== built) document.getElementById("samples").replaceChildren(filters(info[kind]), el("div", { className: "card scroll", id: "rows" }), el("div", { className: "pages", id: "pages" }));
  built = options;
  for (const name of FILTERS) {
    const field = document.getElementById(`filter-${name}`);
    if (field !== document.activeElement) field.value = get(name);
  }
  await refresh(run, info[kind].at(-1) ?? "");
}

function change(name, value) {
  set({ [name]: value, offset: "", ...name === "kind" ? { rollout: "" } : {}, ...name === "by_group" ? { order: "", descending: "" } : {} });
}

function filters(numbers) {
  const field = (label, control) => el("label", {}, label, control);
  const pick = (name, entries) => select(entries, get(name), (value) => change(name, value), { id: `filter-${name}` });
  const entry = (name, type, placeholder) => {
    const control = el("input", { type, placeholder, id: `filter-${name}`, value: get(name) });
    if (type === "number") control.step = "any";
    control.addEventListener("input", () => { clearTimeout(wait); wait = setTimeout(() => change(name, control.value), PAUSE_MS); });
    return control;
  };
  const rollouts = [["", "newest"], ["all", "all"], ...numbers.map((id) => [String(id), String(id)]).reverse()];
  return el("div", { className: "filters" },
    field("of", pick("kind", [["", "training"], ["eval", "evaluation"]])), field("rollout", pick("rollout", rollouts)),
    field("rows", pick("by_group", [["", "samples"], ["true", "groups"]])),
    field("status", pick("status", ["", "completed", "truncated", "aborted", "failed", "pending"].map((s) => [s, s || "any"]))),
    field("reward from", entry("min_reward", "number", "lowest")), field("to", entry("max_reward", "number", "highest")),
    field("tokens from", entry("min_length", "number", "shortest")), field("to", entry("max_length", "number", "longest")),
    field("group", entry("group", "number", "any")),
    field("prompt, response or label contains", entry("text", "search", "")));
}

async function refresh(run, last) {
  const question = ++newest;
  const query = Object.fromEntries([...FILTERS, "order", "descending", "offset"].map((name) => [name, get(name)]));
  const rollout = query.rollout === "all" ? "" : query.rollout || last;
  const rows = document.getElementById("rows"), below = document.getElementById("pages");
  try {
    const found = await ask("/api/samples", { ...query, rollout, run, limit: PAGE });
    if (question !== newest) return;
    rows.replaceChildren(table(found.rows, query));
    below.replaceChildren(...pages(found, Number(query.offset)));
  } catch (error) {
    if (question !== newest) return;
    rows.replaceChildren(el("p", { className: "empty" }, error.message));
    below.replaceChildren();
  }
}

function table(rows, query) {
  if (!rows.length) return el("p", { className: "empty" }, "No recorded sample is like that. --record-samples is the number that a run keeps of each rollout.");
  const order = query.order || "position";
  // The rows of one rollout need no column for it.
  const columns = (query.by_group ? GROUPS : SAMPLES).slice(query.rollout === "all" ? 0 : 1);
  const heads = columns.map(([name, label, className]) => {
    const arrow = order === name ? (query.descending ? " ↓" : " ↑") : "";
    const sort = () => set({ order: name, descending: order === name && !query.descending ? "true" : "", offset: "" });
    return el("th", { className: `${className} ${arrow ? "sorted" : ""} ${UNSORTED.includes(name) ? "fixed" : ""}`, onclick: UNSORTED.includes(name) ? null : sort }, label + arrow);
  });
  const body = rows.map((row) => {
    const open = () => {
      if (query.by_group) set({ group: String(row.group_index), rollout: String(row.rollout), by_group: "", order: "", descending: "", offset: "" });
      else location.hash = sampleAddress(row.rollout, row.position);
    };
    return el("tr", { onclick: open }, ...columns.map(([name, , className]) => cell(row, name, className)));
  });
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
}

function sampleAddress(rollout, position) {
  return address("sample", get("kind", "rollout"), rollout, position);
}

function cell(row, name, className) {
  const value = row[name];
  if (name === "status") return el("td", { className }, el("span", { className: `badge ${value}` }, value));
  if (name === "reward" && !row.rewards) return el("td", { className }, rewardMark(value, 0, 1));
  if (name === "rewards") return el("td", { className }, ...rewardLinks(row.positions.map((position, i) => ({ position, reward: value[i] })), row.rollout));
  if (className.startsWith("text")) return el("td", { className }, value === null || value === undefined ? "–" : JSON.stringify(short(value)).slice(1, -1));
  // Numbers of rollouts, samples and groups are names: without separators of thousands.
  if (className.startsWith("id")) return el("td", { className }, String(value ?? "–"));
  return el("td", { className }, name === "seconds" && value !== null ? value.toFixed(2) : number(value));
}

/** Links to the samples of a group; the one at `here` is marked. */
export function rewardLinks(members, rollout, kind = get("kind", "rollout"), here = null) {
  const values = members.map((member) => member.reward).filter((value) => value !== null);
  const [low, high] = [Math.min(0, ...values), Math.max(...values)];
  return members.map((member) => {
    const link = rewardMark(member.reward, low, high, "a");
    link.href = address("sample", kind, rollout, member.position);
    link.title = [`sample ${member.position}`, member.response_length === undefined ? "" : `${member.response_length} tokens`, member.status ?? ""].filter(Boolean).join(", ");
    link.classList.toggle("here", member.position === here);
    link.addEventListener("click", (event) => event.stopPropagation());
    return link;
  });
}

/** A reward: green from the half of the range on, red at or below 0. */
function rewardMark(value, low, high, tag = "span") {
  const kind = value === null || value === undefined ? "" : value <= 0 ? "low" : value >= (low + high) / 2 ? "high" : "middle";
  return el(tag, { className: `reward ${kind}` }, number(value));
}

function pages(found, offset) {
  const move = (by) => () => set({ offset: Math.max(0, offset + by) || "" });
  const last = Math.min(found.total, offset + PAGE);
  return [
    el("button", { onclick: move(-PAGE), disabled: offset === 0 }, "‹ previous"),
    el("span", {}, found.total ? `${number(offset + 1)}–${number(last)} of ${number(found.total)}` : "none"),
    el("button", { onclick: move(PAGE), disabled: last >= found.total }, "next ›"),
    el("span", {}, `${(found.seconds * 1000).toFixed(1)} ms`),
  ];
}
