// The page: a list of jobs, one job, the pools. Data come from api/stream; the address (#/namespace/name) says which job.
import { clock, curve, describe, duration, element, legend, metric, number, show, timeline } from "./draw.js";

const TONES = { Running: "good", Succeeded: "good", Failed: "bad", Starting: "warn", Pending: "warn", New: "warn", Suspended: "idle" };
const SILENT = 60000, RETRY = 3000; // milliseconds without a word, and before another stream is asked for
// `job`: undefined until somebody has answered, null where there is none of this name.
const state = { overview: null, job: undefined, chosen: chosen(), filter: "", phase: "", by: "", down: false };
const $ = (id) => document.getElementById(id);
let stream = null, retry = null, heard = Date.now(), tried = heard;

function chosen() {
  try {
    const [, namespace, name] = decodeURIComponent(location.hash).split("/");
    return name ? `${namespace}/${name}` : "";
  } catch { // what follows a "%" is no code
    return "";
  }
}

function listen() {
  clearTimeout(retry);
  stream?.close();
  tried = Date.now();
  stream = new EventSource(`api/stream${state.chosen ? `?job=${encodeURIComponent(state.chosen)}` : ""}`);
  stream.addEventListener("overview", (event) => { state.overview = JSON.parse(event.data); drawJobs(); drawPools(); alive(); });
  stream.addEventListener("job", (event) => { state.job = JSON.parse(event.data); drawJob(); alive(); });
  stream.addEventListener("alive", alive);
  stream.onopen = alive;
  stream.onerror = () => {
    say("the operator does not answer; what is shown is old. Trying again …");
    if (stream.readyState === EventSource.CLOSED) retry = setTimeout(listen, RETRY); // the browser does not, by itself
  };
}

function alive() {
  heard = Date.now();
  say("live");
}

function listenForSilence() {
  const now = Date.now();
  if (now - heard < SILENT) return;
  say(`nothing heard for ${Math.floor((now - heard) / 60000)} min; what is shown is old. Trying again …`);
  if (now - tried > SILENT) listen();
}

function say(words) {
  if ($("live").textContent !== words) $("live").textContent = words;
}

const phase = (job) => element("span", { class: `phase ${TONES[job.phase] ?? ""}` }, job.phase);
const cell = (content, name = "") => element("td", name ? { class: name } : {}, content);

// Ascending, or descending; jobs without a value last. Without a column: as the operator sends them, those that run first.
function sorted(jobs) {
  if (!state.by) return jobs;
  const value = (job) => (state.by === "name" ? `${job.namespace}/${job.name}` : job[state.by]);
  const known = jobs.filter((job) => value(job) !== null && value(job) !== "");
  known.sort((a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) * (state.down ? -1 : 1));
  return [...known, ...jobs.filter((job) => value(job) === null || value(job) === "")];
}

// A button for each phase that there is, with how many jobs are in it.
function drawPhases() {
  const counts = new Map();
  for (const job of state.overview.jobs) counts.set(job.phase, (counts.get(job.phase) ?? 0) + 1);
  if (!counts.has(state.phase)) state.phase = "";
  show($("phases"), ...[...counts].sort().map(([name, count]) => element("button", { type: "button", "data-key": name, "data-phase": name, "aria-pressed": String(name === state.phase) }, `${name} ${count}`)));
}

function drawJobs() {
  const words = state.filter.toLowerCase();
  drawPhases();
  const jobs = sorted(state.overview.jobs.filter((job) => (!state.phase || job.phase === state.phase) && `${job.namespace}/${job.name} ${job.phase} ${job.reason}`.toLowerCase().includes(words)));
  const rows = jobs.map((job) => {
    const link = element("a", { href: `#/${job.namespace}/${job.name}` }, `${job.namespace}/${job.name}`);
    if (`${job.namespace}/${job.name}` === state.chosen) link.setAttribute("aria-current", "page");
    const bar = job.progress === null ? "–" : element("span", {}, element("progress", { max: 100, value: job.progress, "aria-label": `${job.name}: ${job.progress} percent done` }), ` ${job.progress} %`);
    return element("tr", { "data-key": `${job.namespace}/${job.name}` }, element("th", { scope: "row" }, link), cell(phase(job)), cell(`${job.ready} / ${job.wanted}`),
      cell(number(job.samplesPerSecond), "n"), cell(metric(job.loss), "n"), cell(bar), cell(duration(job.remaining), "n"),
      cell(String(job.disruptions), "n"), cell(number(job.cost, 2), "n"), cell(job.reason));
  });
  show($("job-table").tBodies[0], ...rows);
  const none = state.overview.jobs.length ? `no job matches “${state.filter}”` : "There are no jobs yet. kubectl apply -f YOUR-JOB.yaml, or shoal submit, makes one.";
  $("none").textContent = rows.length ? "" : none;
  $("none").hidden = rows.length > 0;
  $("jobs-title").textContent = `Jobs (${jobs.length}${jobs.length < state.overview.jobs.length ? ` of ${state.overview.jobs.length}` : ""})`;
}

function drawPools() {
  const rows = state.overview.pools.map((pool) => element("tr", { "data-key": pool.name }, element("th", { scope: "row" }, pool.name), cell(pool.capacityType === "Spot" ? "spot" : "on-demand"),
    cell(pool.accelerator), cell(pool.zone || "any"), cell(number(pool.price, 2), "n"), cell(`${pool.used} / ${pool.free} / ${pool.limit}`, "n"),
    cell(`${number(pool.interruptionsPerHour, 3)} ${pool.measured ? "(measured)" : "(assumed)"}`, "n"), cell(pool.reason ? `${pool.recommended} nodes: ${pool.reason}` : "–", "wide")));
  show($("pool-table").tBodies[0], ...rows);
  $("pools").hidden = rows.length === 0;
}

function card(title, value, note = "") {
  return element("dl", { class: "card" }, element("dt", {}, title), element("dd", {}, value), note ? element("dd", { class: "small" }, note) : null);
}

function drawJob() {
  const section = $("job");
  section.hidden = !state.chosen;
  if (!state.chosen) return show(section);
  const job = state.job;
  const title = element("h2", { id: "job-name", tabindex: "-1" }, state.chosen, " ");
  if (!job) return show(section, title, element("p", {}, job === null ? "There is no such job, or not any more." : "asking …"));
  title.append(phase(job));
  const parts = [title];
  for (const words of new Set([job.message, job.waitsFor, job.lastFailure && `last failure: ${job.lastFailure}`])) if (words) parts.push(element("p", { class: job.phase === "Failed" ? "bad" : "warn" }, words));
  parts.push(facts(job));
  if (job.plan) parts.push(plan(job));
  if (job.spans.length) parts.push(element("div", { class: "panel", "data-key": "pods" }, element("h3", {}, "Slots and their pods over time"), timeline(job), legend(job), table(job)));
  parts.push(element("div", { class: "curves", "data-key": "curves" }, curve(job, 2, "Samples per second", 1), curve(job, 3, "Loss", 3), curve(job, 1, "Workers that run", 0),
    ...job.curves.map((name, index) => curve(job, 4 + index, name))));
  const others = Object.keys(job.metrics).filter((name) => !job.curves.includes(name)).length;
  if (job.curves.length && others) parts.push(element("p", {}, `${others} metrics more have no curve; the card “Loss” has the newest values of all.`));
  show(section, ...parts);
}

function facts(job) {
  const data = job.data;
  const metrics = Object.entries(job.metrics).map(([name, value]) => `${name} ${metric(value)}`).join(", ");
  const finish = job.finish && `${clock(job.finish.at)}`;
  const band = job.finish?.band ? `between ${clock(job.finish.band[0])} and ${clock(job.finish.band[1])}` : job.finish ? `by ${job.finish.basis}` : "";
  const late = job.finish && job.deadline ? (job.finish.at > job.deadline ? `; ${duration(job.finish.at - job.deadline)} after the deadline` : `; ${duration(job.deadline - job.finish.at)} before the deadline`) : "";
  return element("div", { class: "cards", "data-key": "cards" },
    card("Workers", `${job.ready} of ${job.wanted}`, `${job.disruptions} taken by the platform, ${job.failures} failed, ${job.serverRestarts} restarts of parameter servers`),
    card("Speed", `${number(job.samplesPerSecond)} samples/s`, job.inputWait > 0.05 ? `workers wait ${number(100 * job.inputWait, 0)} % of the time for input` : job.goodput !== null ? `${number(100 * job.goodput, 0)} % of the steps count` : ""),
    card("Progress", job.progress === null ? "–" : `${job.progress} %`, `epoch ${job.epoch}, step ${number(job.step, 0)}`),
    card("Loss", metric(job.loss), metrics),
    card("Data of this epoch", `${number(data.done, 0)} of ${data.total === null ? "?" : number(data.total, 0)}`, `whole run: ${number(data.repeated, 0)} repeated, ${number(data.partial, 0)} partial, ${number(data.lost, 0)} lost`),
    job.end ? card("Ended", clock(job.end), job.model ? `model: ${job.model}` : `after ${duration(job.end - job.start)}`) : card("Expected end", finish ?? "–", `${band}${late}`),
    job.money ? card("Cost so far", number(job.money.spent, 2), `${number(job.money.perHour, 2)} per hour now; on-demand nodes: ${number(job.money.onDemand, 2)}; in the currency of the pools’ prices`) : null);
}

function plan(job) {
  const past = job.plans.slice(0, -1).reverse().map((each) => element("li", {}, `${clock(each.at)}: ${each.summary}. ${each.reason}`));
  return element("div", { class: "panel", "data-key": "plan" }, element("h3", {}, `Plan (${job.plan.mode})`),
    element("p", {}, `${job.plan.summary}. ${job.plan.reason}`),
    past.length ? element("details", {}, element("summary", {}, "Earlier plans"), element("ul", {}, ...past)) : null);
}

function table(job) {
  const rows = [...job.spans].sort((a, b) => b.start - a.start).map((span) => element("tr", { "data-key": `${span.role} ${span.index}-${span.incarnation}` }, element("th", { scope: "row" }, `${span.role} ${span.index}-${span.incarnation}`),
    cell(span.state), cell(span.pool || "–"), cell(span.node || "–"), cell(clock(span.start)), cell(duration((span.end ?? job.now) - span.start), "n"), cell(span.cause || "–")));
  const head = ["Pod", "State", "Pool", "Node", "Since", "For", "Why it ended"].map((name) => element("th", { scope: "col" }, name));
  return element("details", {}, element("summary", {}, `The same as a table (${rows.length} pods, newest first)`),
    element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Table of pods" }, element("table", {}, element("thead", {}, element("tr", {}, ...head)), element("tbody", {}, ...rows))));
}

$("phases").addEventListener("click", (event) => {
  const name = event.target.dataset.phase;
  if (!name) return;
  state.phase = state.phase === name ? "" : name;
  drawJobs();
});
for (const head of document.querySelectorAll("#job-table th[data-by]")) {
  const button = element("button", { type: "button", class: "head" }, head.textContent);
  head.replaceChildren(button);
  button.addEventListener("click", () => {
    const numeric = head.classList.contains("n") || head.dataset.by === "progress";
    [state.by, state.down] = [head.dataset.by, state.by === head.dataset.by ? !state.down : numeric];
    for (const each of document.querySelectorAll("#job-table th[data-by]")) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", state.down ? "descending" : "ascending");
    if (state.overview) drawJobs();
  });
}
$("filter").addEventListener("input", (event) => { state.filter = event.target.value; if (state.overview) drawJobs(); });

function choose() {
  state.chosen = chosen();
  state.job = undefined;
  document.title = state.chosen ? `${state.chosen} – Shoal` : "Shoal";
  drawJob();
}
addEventListener("hashchange", () => {
  choose();
  if (state.overview) drawJobs();
  listen();
  (state.chosen ? $("job-name") : $("main"))?.focus();
});
choose();
listen();
setInterval(listenForSilence, 1000);
