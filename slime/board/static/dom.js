// Elements and texts. Text is always set as text: the output of a model or a data set is never read as HTML.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name in node && name !== "list" && name !== "width") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function swatch(color) {
  const node = el("i", { className: "swatch" });
  node.style.background = color; // the policy of the page forbids style attributes
  return node;
}

/** A list of names and values. Values may be elements; those that are missing are left out. */
export function facts(entries) {
  const shown = entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return el("dl", { className: "facts" }, ...shown.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
}

export function select(entries, value, onchange, attributes = {}) {
  const control = el("select", { onchange: (event) => onchange(event.target.value), ...attributes }, ...entries.map(([value, label]) => el("option", { value }, label)));
  control.value = String(value);
  return control;
}

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0 || Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 4 : size < 100 ? 3 : 1 });
}

/** Seconds as 44 s, 3 min 20 s, 2 h 5 min or 3 d 4 h. */
export function duration(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const whole = Math.round(seconds), first = Math.max(0, units.findIndex(([size]) => whole >= size));
  if (whole < 1) return "0 s";
  const [[size, name], next] = [units[first], units[first + 1]];
  const rest = next ? Math.floor(whole % size / next[0]) : 0;
  return `${Math.floor(whole / size)} ${name}${rest ? ` ${rest} ${next[1]}` : ""}`;
}

export function short(value, limit = 200) {
  if (value === null || value === undefined) return null;
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return text.length > limit ? `${text.slice(0, limit)}…` : text;
}

let asking = 0; // questions without an answer, for tests and pictures of the page

export async function ask(path, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  document.body.dataset.asking = ++asking;
  try {
    const reply = await fetch(query.size ? `${path}?${query}` : path);
    const body = await reply.json();
    if (!reply.ok) throw new Error(body.error ?? reply.statusText);
    return body;
  } finally {
    document.body.dataset.asking = --asking;
  }
}
