// Line charts and stacked bars as SVG: axes, zoom by dragging, and the values below the pointer.

import { el, number, svg, swatch } from "./dom.js";

export const COLORS = ["#2f9e6e", "#3f7fd1", "#e08a2b", "#b458c4", "#d0453c", "#1fa3a8", "#8a9a2c", "#8d6e63"];

const H = 196, LEFT = 62, RIGHT = 10, TOP = 8, BOTTOM = 34;

/**
 * A card with a chart.
 *
 * spec.series: [{label, color, x, y}] with the same meaning of x; y may hold null. spec.bars stacks them.
 * spec.smooth: weight of the past in a moving average, 0 to 1. spec.isLog: logarithmic y axis, positive values only.
 * spec.floor: least extent of the y axis from 0, so that rounding errors do not fill it. spec.zoom: [from, to] or null.
 */
export function chart(spec) {
  const root = svg("svg", { role: "img", "aria-label": spec.title });
  const tip = el("div", { className: "tip", hidden: true });
  const legend = spec.series.length > 1 && !spec.hidesLegend
    ? el("div", { className: "legend" }, ...spec.series.map((s) => el("span", {}, swatch(s.color), s.label))) : null;
  const heading = el("h3", { title: spec.meaning ?? "" }, el("span", {}, spec.title), el("span", { className: "unit" }, spec.note ?? ""), ...spec.tools ?? []);
  const box = el("div", { className: "card chart" }, heading, root, legend, tip);
  // Drawn for the width that the card has, because a stretched picture has stretched text.
  new ResizeObserver(([entry]) => draw(root, tip, spec, entry.contentRect.width)).observe(root);
  return box;
}

function draw(root, tip, spec, width) {
  if (width < LEFT + RIGHT + 10) return;
  const scale = makeScale(spec, width);
  root.setAttribute("viewBox", `0 0 ${width} ${H}`);
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: H - BOTTOM, visibility: "hidden" });
  const range = svg("rect", { class: "range", y: TOP, height: H - TOP - BOTTOM, visibility: "hidden" });
  // An inner svg cuts lines at its edges, 3 pixels outside of the axes so that no dot is halved.
  const [x, y, w, h] = [LEFT - 3, TOP - 3, width - LEFT - RIGHT + 6, H - TOP - BOTTOM + 6];
  const plot = svg("svg", { x, y, width: w, height: h, viewBox: `${x} ${y} ${w} ${h}` });
  plot.append(...spec.bars ? bars(spec, scale) : spec.series.flatMap((s) => line(s, spec, scale)), range);
  root.replaceChildren(...frame(spec, scale, width), plot, cursor);
  if (scale.isEmpty) root.append(svg("text", { x: width / 2, y: H / 2, "text-anchor": "middle" }, spec.isLog ? "no positive value" : "no value in this range"));
  else follow(root, tip, spec, scale, cursor, range);
}

function makeScale(spec, width) {
  const xs = spec.series.flatMap((s) => s.x);
  const half = spec.bars ? barStep(spec) / 2 : 0;
  let [x0, x1] = spec.zoom ?? [xs.reduce(least, Infinity) - half, xs.reduce(most, -Infinity) + half];
  if (x0 === x1) x1 = x0 + 1;
  const isShown = (x, y) => x >= x0 && x <= x1 && y !== null && (!spec.isLog || y > 0);
  let ys = spec.series.flatMap((s) => s.y.filter((y, i) => isShown(s.x[i], y)));
  if (spec.bars) ys = [0, ...stacks(spec).filter(([x]) => isShown(x, 1)).map(([, , total]) => total)];
  const isEmpty = !ys.length;
  let y0 = isEmpty ? 0 : ys.reduce(least), y1 = isEmpty ? 1 : ys.reduce(most);
  if (spec.floor && Math.max(-y0, y1) < spec.floor) [y0, y1] = [y0 < 0 ? -spec.floor : 0, spec.floor];
  const ticks = spec.isLog && !isEmpty ? logTicks(y0, y1) : linearTicks(y0, y1);
  [y0, y1] = [ticks[0], ticks[ticks.length - 1]];
  const at = spec.isLog ? Math.log : (y) => y;
  return {
    x0, x1, ticks, isShown, isEmpty,
    px: (x) => LEFT + (x - x0) / (x1 - x0) * (width - LEFT - RIGHT),
    py: (y) => H - BOTTOM - (at(y) - at(y0)) / (at(y1) - at(y0)) * (H - TOP - BOTTOM),
    x: (px) => x0 + (px - LEFT) / (width - LEFT - RIGHT) * (x1 - x0),
  };
}

// reduce, not Math.min(...values): a call with some hundred thousand arguments fails
function least(a, b) { return Math.min(a, b); }
function most(a, b) { return Math.max(a, b); }

function linearTicks(y0, y1) {
  if (y0 === y1) { const pad = Math.abs(y0) * 0.1 || 1; y0 -= y0 === 0 ? 0 : pad; y1 += pad; }
  const step = niceStep((y1 - y0) / 4), first = Math.floor(y0 / step + 1e-9);
  return Array.from({ length: Math.ceil(y1 / step - 1e-9) - first + 1 }, (_, i) => (first + i) * step);
}

/** 1, 10, 100; with 2 and 5 between them if there are few. */
function logTicks(y0, y1) {
  const first = Math.floor(Math.log10(y0)), last = Math.max(first + 1, Math.ceil(Math.log10(y1)));
  const powers = Array.from({ length: last - first + 1 }, (_, i) => first + i);
  const every = Math.ceil(powers.length / 6);
  if (powers.length > 3) return powers.filter((power) => (last - power) % every === 0 || power === first).map((power) => 10 ** power);
  const all = powers.flatMap((power) => [1, 2, 5].map((m) => m * 10 ** power));
  return all.slice(all.findLastIndex((y) => y <= y0), all.findIndex((y) => y >= y1) + 1 || undefined);
}

function niceStep(raw) {
  const power = 10 ** Math.floor(Math.log10(raw));
  return [1, 2, 2.5, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
}

function frame(spec, scale, width) {
  const parts = [];
  const spread = spec.isLog ? null : scale.ticks[1] - scale.ticks[0];
  for (const y of scale.ticks) {
    parts.push(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: scale.py(y), y2: scale.py(y) }));
    parts.push(svg("text", { x: LEFT - 6, y: scale.py(y) + 3.5, "text-anchor": "end" }, tick(y, spread)));
  }
  const raw = (scale.x1 - scale.x0) / Math.max(2, Math.floor(width / 80));
  const step = spec.isWhole ? Math.max(1, Math.ceil(niceStep(raw))) : niceStep(raw);
  for (let k = Math.ceil(scale.x0 / step); k * step <= scale.x1; k++) {
    parts.push(svg("text", { x: scale.px(k * step), y: H - BOTTOM + 14, "text-anchor": "middle" }, tick(k * step, step)));
  }
  parts.push(svg("text", { class: "axis", x: (LEFT + width - RIGHT) / 2, y: H - 3, "text-anchor": "middle" }, spec.axis));
  if (spec.unit) parts.push(svg("text", { class: "axis", x: -(TOP + H - BOTTOM) / 2, y: 10, transform: "rotate(-90)", "text-anchor": "middle" }, spec.unit));
  return parts;
}

/** As many digits as tell this tick from the next one, which is `step` away. step null: a logarithmic axis. */
function tick(value, step) {
  const size = Math.abs(value);
  if (size < (step ?? 0) / 1e6) return "0";
  const digits = step === null ? 1 : Math.max(1, Math.floor(Math.log10(size)) - Math.floor(Math.log10(step)) + 2);
  const rounded = Number(value.toPrecision(digits));
  if (size >= 1e4) return rounded.toLocaleString("en", { notation: "compact", maximumFractionDigits: 2 });
  return size < 1e-3 ? rounded.toExponential() : String(rounded);
}

function line(series, spec, scale) {
  // A few points, as of evaluations, stay what they are.
  const isSmooth = spec.smooth && series.y.length > 30;
  const shown = isSmooth ? smoothed(series.y, spec.smooth) : series.y;
  const paths = [trace(series.x, shown, series.color, scale)];
  if (isSmooth) paths.unshift(trace(series.x, series.y, series.color, scale, "raw"));
  const dots = series.x.length < 30 ? series.x.flatMap((x, i) => scale.isShown(x, shown[i]) ? [svg("circle", { cx: scale.px(x), cy: scale.py(shown[i]), r: 2.2, fill: series.color })] : []) : [];
  return [...paths, ...dots];
}

function trace(xs, ys, color, scale, className = "line") {
  let d = "", pen = "M";
  // Points beside the range are drawn too, and cut: otherwise lines would end before its edge.
  ys.forEach((y, i) => {
    if (!scale.isShown(scale.x0, y)) { pen = "M"; return; }
    d += `${pen}${scale.px(xs[i]).toFixed(1)} ${scale.py(y).toFixed(1)}`;
    pen = "L";
  });
  return svg("path", { d, class: className, stroke: color });
}

/** Exponential moving average. Without the divisor its first values would be too small. */
export function smoothed(ys, weight) {
  let sum = 0, total = 0;
  return ys.map((y) => {
    if (y === null) return null;
    sum = weight * sum + (1 - weight) * y;
    total = weight * total + (1 - weight);
    return sum / total;
  });
}

/** [x, [value of each series], total] of each bar. */
function stacks(spec) {
  const values = spec.series.map((s) => new Map(s.x.map((x, i) => [x, s.y[i] ?? 0])));
  const xs = [...new Set(spec.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  return xs.map((x) => {
    const parts = values.map((map) => map.get(x) ?? 0);
    return [x, parts, parts.reduce((a, b) => a + b, 0)];
  });
}

function barStep(spec) {
  const xs = [...new Set(spec.series.flatMap((s) => s.x))].sort((a, b) => a - b);
  return xs.length > 1 ? xs.slice(1).map((x, i) => x - xs[i]).reduce(least) : 1;
}

function bars(spec, scale) {
  const width = Math.max(0.6, (scale.px(barStep(spec)) - scale.px(0)) * 0.78);
  const paths = spec.series.map(() => "");
  for (const [x, parts] of stacks(spec)) {
    let base = 0;
    parts.forEach((value, i) => {
      if (value > 0) paths[i] += `M${scale.px(x) - width / 2} ${scale.py(base)}h${width}V${scale.py(base + value)}h${-width}Z`;
      base += value;
    });
  }
  return paths.map((d, i) => svg("path", { d, fill: spec.series[i].color }));
}

/** The values at the pointer, and the range that it selects. */
function follow(root, tip, spec, scale, cursor, range) {
  let from = null; // where a drag began
  const position = (event) => event.clientX - root.getBoundingClientRect().left;
  const hide = () => { tip.hidden = true; for (const mark of [cursor, range]) mark.setAttribute("visibility", "hidden"); };
  root.onpointerdown = (event) => { from = position(event); };
  root.onpointermove = (event) => {
    const x = position(event);
    if (from !== null && Math.abs(x - from) > 4) {
      range.setAttribute("x", Math.min(x, from));
      range.setAttribute("width", Math.abs(x - from));
      range.setAttribute("visibility", "visible");
      root.setPointerCapture(event.pointerId);
    }
    explain(tip, spec, scale, cursor, scale.x(x), root.clientWidth);
  };
  root.onpointerup = (event) => {
    const ends = [from, position(event)].sort((a, b) => a - b).map(scale.x);
    if (from !== null && Math.abs(position(event) - from) > 8) spec.onZoom?.(ends);
    from = null;
    hide();
  };
  root.onpointercancel = () => { from = null; hide(); };
  root.onpointerleave = () => { if (from === null) hide(); };
  root.ondblclick = () => spec.onZoom?.(null);
}

function explain(tip, spec, scale, cursor, wanted, width) {
  const all = spec.series.map((s) => [s, nearest(s, wanted)]).filter(([, i]) => i !== null);
  const distance = ([s, i]) => Math.abs(s.x[i] - wanted);
  const best = all.reduce((a, b) => distance(b) < distance(a) ? b : a);
  // Runs have different x: the tip shows the values of the others only if they are close.
  const points = all.filter(([s, i]) => Math.abs(s.x[i] - best[0].x[best[1]]) <= (scale.x1 - scale.x0) / 25);
  tip.hidden = false;
  const x = scale.px(best[0].x[best[1]]);
  for (const end of ["x1", "x2"]) cursor.setAttribute(end, x);
  cursor.setAttribute("visibility", "visible");
  const values = points.map(([s, i]) => el("div", {}, swatch(s.color), `${points.length > 1 ? `${s.label}  ` : ""}${number(s.y[i])}`));
  tip.replaceChildren(el("div", {}, `${spec.axis} ${number(best[0].x[best[1]])}`), ...values);
  tip.style.left = `${Math.max(4, x < width / 2 ? x + 26 : x - tip.offsetWidth - 2)}px`;
}

function nearest(series, x) {
  let found = null;
  series.x.forEach((value, i) => {
    if (series.y[i] !== null && (found === null || Math.abs(value - x) < Math.abs(series.x[found] - x))) found = i;
  });
  return found;
}
