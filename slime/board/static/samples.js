// The table of samples and its filters.

import { ask, el, number } from "./dom.js";

const COLUMNS = [
  ["rollout", "rollout", true], ["position", "sample", true], ["group_index", "group", true], ["status", "status", false],
  ["reward", "reward", true], ["prompt_tokens", "prompt", true], ["response_length", "response", true], ["trained_tokens", "trained", true],
  ["weight_version", "weights", true], ["seconds", "seconds", true], ["snippet", "response begins", false],
];
const PAGE = 50;

const query = { kind: "rollout", rollout: "", status: "", min_reward: "", max_reward: "", min_length: "", max_length: "", text: "", order: "position", descending: false, offset: 0, limit: PAGE };
let run = null;
let newest = 0; // answers may overtake each other: only that of the last question is shown

export async function showSamples(current) {
  const isNew = run === null;
  run = current;
  if (isNew) {
    query.rollout = run.rollouts.at(-1) ?? "";
    document.getElementById("samples").replaceChildren(filters(), el("div", { className: "card", id: "rows" }));
  } else {
    fill(document.getElementById("filter-rollout"), numbers()); // a run that goes on has more of them
  }
  await refresh();
}

function numbers() {
  return [["", "all"], ...(query.kind === "eval" ? run.evals : run.rollouts).map((id) => [String(id), String(id)]).reverse()];
}

function fill(control, entries) {
  control.replaceChildren(...entries.map(([value, label]) => el("option", { value }, label)));
  control.value = String(query.rollout);
}

function filters() {
  const field = (label, control) => el("label", {}, label, control);
  const change = (name) => (event) => { query[name] = event.target.value; query.offset = 0; refresh(); };
  const select = (name, entries) => {
    const control = el("select", { onchange: change(name), id: `filter-${name}` }, ...entries.map(([value, label]) => el("option", { value }, label)));
    control.value = String(query[name]);
    return control;
  };
  const kind = select("kind", [["rollout", "training"], ["eval", "evaluation"]]);
  const rollout = select("rollout", numbers());
  kind.addEventListener("change", () => {
    query.rollout = numbers()[1]?.[0] ?? "";
    fill(rollout, numbers());
    refresh();
  });
  const entry = (name, placeholder) => el("input", { type: "number", step: "any", placeholder, oninput: change(name), "aria-label": `${placeholder} ${name}` });
  return el("div", { className: "filters" },
    field("of", kind), field("rollout", rollout),
    field("status", select("status", ["", "completed", "truncated", "aborted", "failed", "pending"].map((s) => [s, s || "any"]))),
    field("reward from", entry("min_reward", "lowest")), field("to", entry("max_reward", "highest")),
    field("tokens from", entry("min_length", "shortest")), field("to", entry("max_length", "longest")),
    field("beginning contains", el("input", { type: "search", oninput: change("text") })));
}

async function refresh() {
  const place = document.getElementById("rows");
  const question = ++newest;
  try {
    const found = await ask("/api/samples", query);
    if (question === newest) place.replaceChildren(table(found.rows), pages(found));
  } catch (error) {
    if (question === newest) place.replaceChildren(el("p", { className: "empty" }, error.message));
  }
}

function table(rows) {
  if (!rows.length) return el("p", { className: "empty" }, "No sample is like that. --record-samples says how many of each rollout are kept.");
  const sort = (name) => () => {
    query.descending = query.order === name ? !query.descending : false;
    query.order = name;
    query.offset = 0;
    refresh();
  };
  const heads = COLUMNS.map(([name, label, isNumber]) => {
    const arrow = query.order === name ? (query.descending ? " ↓" : " ↑") : "";
    return el("th", { className: `${isNumber ? "num" : ""} ${arrow ? "sorted" : ""}`, onclick: sort(name) }, label + arrow);
  });
  const body = rows.map((row) => el("tr", { onclick: () => { location.hash = `sample/${query.kind}/${row.rollout}/${row.position}`; } }, ...COLUMNS.map(([name, , isNumber]) => cell(name, row[name], isNumber))));
  return el("table", {}, el("thead", {}, el("tr", {}, ...heads)), el("tbody", {}, ...body));
}

function cell(name, value, isNumber) {
  if (name === "status") return el("td", {}, el("span", { className: `badge ${value}` }, value));
  if (name === "snippet") return el("td", { className: "text" }, JSON.stringify(value).slice(1, -1));
  return el("td", { className: isNumber ? "num" : "" }, name === "seconds" && value !== null ? value.toFixed(2) : number(value));
}

function pages(found) {
  const move = (by) => () => { query.offset = Math.max(0, query.offset + by); refresh(); };
  const last = Math.min(found.total, query.offset + PAGE);
  return el("div", { className: "pages" },
    el("button", { onclick: move(-PAGE), disabled: query.offset === 0 }, "‹ previous"),
    el("span", {}, found.total ? `${number(query.offset + 1)}–${number(last)} of ${number(found.total)}` : "none"),
    el("button", { onclick: move(PAGE), disabled: last >= found.total }, "next ›"),
    el("span", {}, `${(found.seconds * 1000).toFixed(1)} ms`));
}
