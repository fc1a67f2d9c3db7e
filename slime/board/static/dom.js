// Elements and numbers. Text is always set as text: what a model or a data set says is never read as HTML.

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

export function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (value === 0 || Number.isInteger(value) && size < 1e6) return value.toLocaleString("en");
  if (size < 1e-3 || size >= 1e6) return value.toExponential(2);
  return value.toLocaleString("en", { maximumFractionDigits: size < 1 ? 4 : size < 100 ? 3 : 1 });
}

export async function ask(path, values = {}) {
  const query = new URLSearchParams(Object.entries(values).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const reply = await fetch(query.size ? `${path}?${query}` : path);
  const body = await reply.json();
  if (!reply.ok) throw new Error(body.error ?? reply.statusText);
  return body;
}
