// The list of runs, and the page of one run: command, machine, settings.

import { COLORS } from "./charts.js";
import { evalSets, progressOf } from "./curves.js";
import { duration, el, facts, number, short, swatch } from "./dom.js";
import { address, get, set } from "./state.js";

export function stateBadge(run) {
  const isQuiet = run.state === "running" && run.age_s > 120;
  const text = run.state === "running" && run.phase ? `running: ${run.phase}` : run.state;
  return el("span", { className: `badge ${run.state}` }, isQuiet ? `${text}, ${duration(run.age_s)} without a change` : text);
}

export function showRuns(list, chosen) {
  const heads = [["", ""], ["run", ""], ["state", ""], ["rollouts", ""], ["left", "minor"], ["reward", "num"], ["evaluation", ""], ["duration", "minor"], ["last change", "minor"]];
  const rows = list.map((run) => {
    const place = chosen.indexOf(run.name);
    const box = el("input", { type: "checkbox", checked: place >= 0, disabled: place === 0 && chosen.length === 1, "aria-label": `compare ${run.name}` });
    box.addEventListener("change", () => set({ run: box.checked ? [...chosen, run.name] : chosen.filter((name) => name !== run.name), zoom: "" }));
    const open = el("a", { href: "#overview", onclick: (event) => { event.preventDefault(); set({ run: run.name, zoom: "" }); location.hash = address("overview"); } }, run.name);
    const [done, left] = progressOf(run);
    const bar = run.num_rollout ? el("progress", { max: run.num_rollout, value: run.done, "aria-label": done }) : null;
    const scores = evalSets(Object.keys(run.evals)).map((name) => `${name.slice(5)} ${number(run.evals[name])}`).join(", ");
    const cells = [box, el("span", { className: "name" }, place >= 0 ? swatch(COLORS[place % COLORS.length]) : null, open), stateBadge(run), el("span", {}, done, bar), left.replace(" left", ""), number(run.reward), scores || "–", duration(run.changed - run.started), `${duration(run.age_s)} ago`];
    return el("tr", {}, ...cells.map((cell, i) => el("td", { className: heads[i][1] }, cell)));
  });
  document.getElementById("run-list").replaceChildren(el("table", {}, el("thead", {}, el("tr", {}, ...heads.map(([text, className]) => el("th", { className }, text)))), el("tbody", {}, ...rows)));
}

export function showRun(summary, info) {
  const [done, left] = progressOf(summary);
  const about = [
    ["state", stateBadge(summary)], ["rollouts", [done, left].filter(Boolean).join(", ")],
    ["started", new Date(summary.started * 1000).toLocaleString()], ["duration", duration(summary.changed - summary.started)],
    ["last change", `${duration(summary.age_s)} ago`], ["model", info.hf_checkpoint], ["folder", info.folder], ["host", info.host],
    ["commit", info.commit], ["recorded rollouts", number(info.rollout.length)],
  ];
  const command = commandText(info);
  const copy = el("button", { onclick: () => copyText(command, copy) }, "copy");
  const versions = Object.entries(info.versions);
  document.getElementById("run-facts").replaceChildren(
    el("div", { className: "card" }, el("h4", {}, "Run"), facts(about)),
    ...versions.length ? [el("div", { className: "card" }, el("h4", {}, "Versions"), facts(versions))] : [],
    el("div", { className: "card full" }, el("h4", {}, "Command", copy), el("pre", {}, command)));
  showSettings(info.settings);
}

function showSettings(settings) {
  const filter = get("setting").toLowerCase();
  const shown = Object.entries(settings).filter(([name, value]) => `${name} ${JSON.stringify(value)}`.toLowerCase().includes(filter)).sort();
  document.getElementById("settings").replaceChildren(shown.length
    ? facts(shown.map(([name, value]) => [name, value === null ? "–" : short(value, 300) || "\"\""]))
    : el("p", { className: "empty" }, "No setting is like that."));
}

/** One flag per line, quoted for a shell. */
function commandText(info) {
  const quoted = info.argv.map((word) => /^[\w@%+=:,./-]+$/.test(word) ? word : `'${word.replaceAll("'", "'\\''")}'`);
  const lines = quoted.reduce((lines, word) => { if (word.startsWith("--") || !lines.length) lines.push(word); else lines[lines.length - 1] += ` ${word}`; return lines; }, []);
  return [info.driver.endsWith(".py") ? `python ${info.driver}` : info.driver, ...lines].join(" \\\n  ");
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    // Browsers allow it on localhost and on encrypted pages only.
    button.textContent = "not allowed here: select the text";
  }
}
