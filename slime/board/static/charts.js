// Line charts and stacked bars as SVG, with a cursor that names the values below it.

import { el, number, svg } from "./dom.js";

export const COLORS = ["#2f9e6e", "#3f7fd1", "#e08a2b", "#b458c4", "#d0453c", "#1fa3a8", "#8a9a2c", "#8d6e63"];

const W = 420, H = 176, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 20;

/** A card with one or several lines. series: [{label, x, y}], y may hold null. */
export function lineChart(title, unit, series, axis, meaning = "") {
  const points = series.flatMap((s) => s.y.map((y, i) => [s.x[i], y])).filter(([, y]) => y !== null);
  if (!points.length) return null;
  const scale = makeScale(points.map((p) => p[0]), points.map((p) => p[1]));
  const root = frame(scale);
  series.forEach((s, i) => drawLine(root, s, COLORS[i % COLORS.length], scale));
  const lookup = (x) => series.map((s) => [s.label, at(s, x)]);
  const last = series.length === 1 ? number([...series[0].y].reverse().find((y) => y !== null)) : "";
  return finish(card(title, last || unit, root, meaning), root, scale, [...new Set(points.map((p) => p[0]))].sort((a, b) => a - b), lookup, axis, series);
}

/** A card with one bar per x, made of parts. series: [{label, x, y}] with the same x. */
export function barChart(title, unit, series, axis) {
  const xs = [...new Set(series.flatMap((s) => s.x))].sort((a, b) => a - b);
  if (!xs.length) return null;
  const values = series.map((s) => new Map(s.x.map((x, i) => [x, s.y[i] ?? 0])));
  const totals = xs.map((x) => values.reduce((sum, map) => sum + (map.get(x) ?? 0), 0));
  const scale = makeScale([xs[0] - 0.5, xs[xs.length - 1] + 0.5], [0, ...totals]);
  const root = frame(scale);
  const step = xs.length > 1 ? Math.min(...xs.slice(1).map((x, i) => x - xs[i])) : 1;
  const width = Math.max(0.6, (scale.px(step) - scale.px(0)) * 0.78);
  const paths = series.map(() => "");
  xs.forEach((x) => {
    let base = 0;
    values.forEach((map, i) => {
      const value = map.get(x) ?? 0;
      if (value > 0) paths[i] += `M${scale.px(x) - width / 2} ${scale.py(base)}h${width}V${scale.py(base + value)}h${-width}Z`;
      base += value;
    });
  });
  paths.forEach((d, i) => root.append(svg("path", { d, fill: COLORS[i % COLORS.length] })));
  const lookup = (x) => series.map((s, i) => [s.label, values[i].get(x) ?? null]);
  return finish(card(title, unit, root), root, scale, xs, lookup, axis, series);
}

function card(title, unit, root, meaning = "") {
  return el("div", { className: "card chart" }, el("h3", { title: meaning }, title, el("span", { className: "unit" }, unit)), root);
}

function finish(box, root, scale, xs, lookup, axis, series) {
  if (series.length > 1) {
    box.append(el("div", { className: "legend" }, ...series.map((s, i) => {
      const swatch = el("i");
      swatch.style.background = COLORS[i % COLORS.length];
      return el("span", {}, swatch, s.label);
    })));
  }
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  root.append(cursor);
  const tip = el("div", { className: "tip", hidden: true });
  box.append(tip);
  root.addEventListener("pointermove", (event) => {
    const area = root.getBoundingClientRect();
    const wanted = scale.x0 + ((event.clientX - area.left) / area.width * W - LEFT) / (W - LEFT - RIGHT) * (scale.x1 - scale.x0);
    const x = xs.reduce((best, value) => Math.abs(value - wanted) < Math.abs(best - wanted) ? value : best, xs[0]);
    cursor.setAttribute("x1", scale.px(x));
    cursor.setAttribute("x2", scale.px(x));
    cursor.setAttribute("visibility", "visible");
    const values = lookup(x).filter(([, value]) => value !== null);
    tip.textContent = [`${axis} ${number(x)}`, ...values.map(([label, value]) => values.length > 1 ? `${label}  ${number(value)}` : number(value))].join("\n");
    tip.hidden = false;
    const left = scale.px(x) / W * area.width + 24;
    tip.style.left = `${left > area.width * 0.6 ? left - tip.offsetWidth - 30 : left}px`;
    tip.style.top = "44px";
  });
  root.addEventListener("pointerleave", () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); });
  return box;
}

function makeScale(xs, ys) {
  const x0 = Math.min(...xs), x1 = Math.max(...xs) === x0 ? x0 + 1 : Math.max(...xs);
  let y0 = Math.min(...ys), y1 = Math.max(...ys);
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= y0 === 0 ? 0 : pad; y1 += pad; }
  const step = niceStep((y1 - y0) / 4);
  y0 = Math.floor(y0 / step) * step;
  y1 = Math.ceil(y1 / step) * step;
  return {
    x0, x1, y0, y1, step,
    px: (x) => LEFT + (x - x0) / (x1 - x0) * (W - LEFT - RIGHT),
    py: (y) => H - BOTTOM - (y - y0) / (y1 - y0) * (H - TOP - BOTTOM),
  };
}

function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
}

function frame(scale) {
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img" });
  for (let y = scale.y0; y <= scale.y1 + scale.step / 2; y += scale.step) {
    root.append(svg("line", { class: "grid", x1: LEFT, x2: W - RIGHT, y1: scale.py(y), y2: scale.py(y) }));
    root.append(svg("text", { x: LEFT - 6, y: scale.py(y) + 3.5, "text-anchor": "end" }, tick(y, scale.step)));
  }
  const first = Math.ceil(scale.x0), last = Math.floor(scale.x1);
  const step = Math.max(1, niceStep((last - first) / 5 || 1));
  for (let x = first; x <= last; x += Math.ceil(step)) {
    root.append(svg("text", { x: scale.px(x), y: H - 5, "text-anchor": "middle" }, number(x + 0)));
  }
  return root;
}

function tick(value, step) {
  if (Math.abs(value) < step / 1e6) return "0";
  const digits = Math.max(0, -Math.floor(Math.log10(step)) + (Number.isInteger(step / 10 ** Math.floor(Math.log10(step))) ? 0 : 1));
  return Math.abs(value) >= 1e5 || digits > 4 ? value.toExponential(1) : value.toFixed(digits);
}

function drawLine(root, series, color, scale) {
  let d = "", pen = "M";
  series.y.forEach((y, i) => {
    if (y === null) { pen = "M"; return; }
    d += `${pen}${scale.px(series.x[i]).toFixed(1)} ${scale.py(y).toFixed(1)}`;
    pen = "L";
  });
  const line = { d, fill: "none", stroke: color, "stroke-width": 1.7, "stroke-linejoin": "round", "vector-effect": "non-scaling-stroke" };
  root.append(svg("path", line));
  if (series.x.length < 30) {
    series.y.forEach((y, i) => y !== null && root.append(svg("circle", { cx: scale.px(series.x[i]), cy: scale.py(y), r: 2.2, fill: color })));
  }
}

function at(series, x) {
  const place = series.x.indexOf(x);
  return place < 0 ? null : series.y[place];
}
