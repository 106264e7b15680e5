// Drawing: the time line and the curves as SVG. Pure functions of the data of /api/jobs; each has words for a screen reader.
const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  return fill(made, attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(made, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) made.setAttribute(key, value);
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Show these children in a place, and keep the elements that it has: what is focused, opened, scrolled or selected stays
// so, and a screen reader does not say it again. `data-key` tells elements apart that come, go and change places.
export function show(place, ...children) {
  const focused = document.activeElement;
  morph(place, fill(place.cloneNode(false), {}, children));
  if (focused !== document.activeElement && focused.isConnected) focused.focus({ preventScroll: true }); // it was moved
}

function morph(old, made) {
  for (const { name, value } of made.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  for (const { name } of [...old.attributes]) if (!made.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  const keyed = new Map([...old.children].filter((each) => each.dataset.key).map((each) => [each.dataset.key, each]));
  const wanted = new Set([...made.children].map((each) => each.dataset.key));
  for (const [key, each] of keyed) if (!wanted.has(key)) each.remove();
  let at = old.firstChild; // what is before it is as it should be
  for (const node of [...made.childNodes]) {
    const key = node.dataset?.key;
    const there = key ? keyed.get(key) : at && at.nodeName === node.nodeName && !at.dataset?.key ? at : null;
    if (!there) old.insertBefore(node, at);
    else if (there.nodeType === Node.TEXT_NODE) there.data = node.data;
    else morph(there, node);
    if (there && there === at) at = at.nextSibling;
    else if (there) old.insertBefore(there, at);
  }
  while (at) {
    const next = at.nextSibling;
    at.remove();
    at = next;
  }
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  const whole = Math.max(0, Math.round(seconds));
  const [days, hours, minutes] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24, Math.floor(whole / 60) % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${whole % 60} s` : `${whole} s`;
}

export function number(value, digits = 1) {
  if (value === null || value === undefined) return "–";
  return value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
}

// A loss or a metric, as Keras prints it.
export function metric(value) {
  return value && Math.abs(value) <= 1e-3 ? value.toExponential(4) : number(value, 4);
}

// A value of any size in few characters.
export function brief(value) {
  const size = Math.abs(value);
  return size && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

export function clock(seconds) {
  return new Date(seconds * 1000).toLocaleString(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
}

export function short(seconds, range) {
  const time = { hour: "2-digit", minute: "2-digit", hour12: false };
  const options = range > 86400 ? { month: "short", day: "numeric", ...time } : range < 600 ? { ...time, second: "2-digit" } : time;
  return new Date(seconds * 1000).toLocaleString(undefined, options);
}

// Pool names to classes p0…p7 in the order of their names; without a pool p7.
export function colours(spans) {
  const names = [...new Set(spans.map((span) => span.pool).filter(Boolean))].sort();
  return new Map(names.map((name, index) => [name, `p${Math.min(index, 6)}`]));
}

const place = (span) => `${span.role} ${span.index}`;
const NORMAL = new Set(["", "Finished", "Completed", "ScaledDown", "Suspended"]);

export function timeline(job) {
  const spans = job.spans;
  const rows = [...new Map(spans.map((span) => [place(span), span])).keys()];
  const from = Math.min(job.start ?? Infinity, ...spans.map((span) => span.start));
  const until = Math.max(job.end ?? job.now, from + 1, ...(job.finish ? [job.finish.at, job.finish.band?.[1] ?? 0] : []), job.end ? 0 : Math.min(job.deadline ?? 0, job.now + 4 * (job.now - from)));
  const [left, width, height, gap] = [86, 1100, 16, 22];
  const x = (at) => left + ((at - from) / (until - from)) * (width - left - 14);
  const bottom = 10 + rows.length * gap;
  const colour = colours(spans);
  const lost = spans.filter((span) => !NORMAL.has(span.cause));
  const words = `Time line of ${rows.length} slots from ${clock(from)}: ${spans.length} pods, ${lost.length} of them taken or failed. The table below has the same.`;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${bottom + 26}`, role: "img", "aria-label": words });
  for (let tick = 0; tick <= 5; tick++) {
    const at = from + ((until - from) * tick) / 5;
    drawn.append(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: 4, y2: bottom }), svg("text", { x: x(at), y: bottom + 16, "text-anchor": tick === 5 ? "end" : tick ? "middle" : "start" }, short(at, until - from)));
  }
  rows.forEach((name, row) => drawn.append(svg("text", { x: 0, y: 10 + row * gap + 12 }, name)));
  for (const span of spans) {
    const y = 8 + rows.indexOf(place(span)) * gap;
    const end = span.end ?? job.now;
    const bar = svg("rect", { class: `${colour.get(span.pool) ?? "p7"} ${span.state === "Draining" || span.state === "Silent" || span.state === "Starting" ? "leaving" : ""}`, x: x(span.start), y, width: Math.max(2, x(end) - x(span.start) - 1), height, rx: 2 });
    bar.append(svg("title", {}, describe(span, job.now)));
    drawn.append(bar);
    if (span.end && !NORMAL.has(span.cause)) drawn.append(svg("text", { class: "end", x: x(end) - 4, y: y + 12, "text-anchor": "end" }, "×"));
  }
  if (!job.end) drawn.append(svg("line", { class: "now", x1: x(job.now), x2: x(job.now), y1: 0, y2: bottom }));
  if (job.finish?.band) drawn.append(svg("rect", { class: "band", x: x(job.finish.band[0]), y: 2, width: Math.max(2, x(job.finish.band[1]) - x(job.finish.band[0])), height: bottom - 4 }, svg("title", {}, "expected end, as wide as the prediction was wrong so far")));
  if (job.deadline && job.deadline <= until) drawn.append(svg("line", { class: "deadline", x1: x(job.deadline), x2: x(job.deadline), y1: 0, y2: bottom }, svg("title", {}, `deadline ${clock(job.deadline)}`)));
  return drawn;
}

export function describe(span, now) {
  const name = `${span.role} ${span.index}-${span.incarnation}`;
  const where = [span.node, span.pool && `pool ${span.pool}`].filter(Boolean).join(", ");
  const length = duration((span.end ?? now) - span.start);
  return `${name}${where ? ` on ${where}` : ""}: ${span.known ? "" : "at least "}${length}, ${span.end ? "ended" : span.state}${span.cause ? `: ${span.cause}` : ""}`;
}

export function legend(job) {
  const list = element("ul", { class: "legend" });
  const mark = (name, text) => element("li", {}, svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("rect", { class: name, width: 12, height: 12, rx: 2 })), text);
  for (const [pool, name] of colours(job.spans)) list.append(mark(name, pool));
  if (job.spans.some((span) => !span.pool)) list.append(mark("p7", "no pool"));
  list.append(element("li", {}, "× taken or failed"), element("li", {}, "pale: starting, silent or leaving"));
  if (job.finish?.band) list.append(element("li", {}, "shaded: expected end"));
  if (job.deadline) list.append(element("li", {}, "dashed red: deadline"));
  return list;
}

// `column`: 1 workers, 2 samples/s, 3 loss, then the metrics, which a point lacks that is older than they are. Workers and
// speeds are drawn from 0. Without `digits`: four that count.
export function curve(job, column, title, digits) {
  const points = job.samples.filter((sample) => (sample[column] ?? null) !== null).map((sample) => [sample[0], sample[column]]);
  const panel = element("div", { class: "panel" }, element("h3", {}, title));
  if (points.length < 2) {
    panel.append(element("p", {}, "no values yet since the operator started"));
    return panel;
  }
  const [width, height, left, bottom] = [420, 150, 54, 128];
  const [from, until] = [points[0][0], points.at(-1)[0]];
  const values = points.map((point) => point[1]);
  const [low, high] = [Math.min(...values, column < 3 ? 0 : Infinity), Math.max(...values)];
  const x = (at) => left + ((at - from) / (until - from || 1)) * (width - left - 6);
  const y = (value) => bottom - ((value - low) / (high - low || 1)) * (bottom - 14);
  const said = (value) => (digits === undefined ? brief(value) : number(value, digits));
  const words = `${title}: now ${said(values.at(-1))}, lowest ${said(Math.min(...values))}, highest ${said(high)}, since ${clock(from)}`;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words });
  for (const value of new Set([low, (low + high) / 2, high])) {
    drawn.append(svg("line", { class: "axis", x1: left, x2: width, y1: y(value), y2: y(value) }), svg("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, said(value)));
  }
  drawn.append(svg("polyline", { class: "curve", points: points.map((point) => `${x(point[0]).toFixed(1)},${y(point[1]).toFixed(1)}`).join(" ") }));
  drawn.append(svg("text", { x: left, y: height - 4 }, short(from, until - from)), svg("text", { x: width, y: height - 4, "text-anchor": "end" }, short(until, until - from)));
  panel.append(drawn);
  return panel;
}
