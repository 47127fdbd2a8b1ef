// Draws a cluster from its snapshot: Snapshot in hpcgpu/existing_clusters/snapshot.py.
//
// A plain ES module without imports, used in two places:
// - The widget of a notebook. hpcgpu/widget/notebook_widget.py joins this file and notebook.js into one module.
// - A page of the server extension, with widget.css beside it:
//       import { clusterView, serverActions } from "BASE/hpcgpu/static/panel.js";
//       const view = clusterView(element, { actions: serverActions(base, name) });
//       view.update(snapshot);   // again with each new snapshot; what the user has typed and opened stays
//
// Actions that are not given have no control.
// Text of others (names, reasons, logs) reaches the page by textContent and attributes alone, never as HTML.

const MANY = 20; // of more jobs the table shows a summary and a few
const FEW = 10;
const MANY_GPUS = 32;
const SVG = "http://www.w3.org/2000/svg";

// ---- elements and words

function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

function svg(tag, properties = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(properties)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function replace(element, ...children) {
  element.replaceChildren(...children.filter((child) => child !== null && child !== undefined));
}

export function duration(seconds) {
  if (seconds < 90) return `${Math.round(Math.max(0, seconds))} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

function clock(epoch, now, seconds = false) {
  const time = new Date(epoch * 1000);
  const text = time.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: seconds ? "2-digit" : undefined });
  if (time.toDateString() === new Date(now * 1000).toDateString()) return text;
  return `${time.toLocaleDateString([], { day: "numeric", month: "short" })}, ${text}`;
}

function counted(number, noun) {
  return `${number.toLocaleString("en-US")} ${noun}${number === 1 ? "" : "s"}`;
}

function gib(bytes) {
  return (bytes / 2 ** 30).toFixed(bytes < 10 * 2 ** 30 ? 1 : 0);
}

function safeLink(address) {
  return /^(https?:\/\/|\/(?!\/))/.test(address) ? address : "";
}

const ALIVE = new Set(["pending", "running", "completing", "unknown"]);

// Whether nothing of a cluster changes any more. What the queue does not know may stay so for ever.
export function over({ state, jobs }) {
  return state === "closed" || (state === "ended" && !jobs.some((job) => job.state !== "unknown" && ALIVE.has(job.state)));
}

const WAITS = "pending";

function started(job) {
  return job.started ?? (job.state === "running" && job.submitted ? job.submitted + job.waited : null);
}

function startWords(job, now) {
  const since = started(job);
  if (job.state !== WAITS) return since ? clock(since, now) : "";
  if (job.expected_start) return `${clock(job.expected_start, now)} (the queue's estimate)`;
  if (job.usual_wait !== null && job.usual_wait !== undefined) return `usually after ${duration(job.usual_wait)}`;
  return "not known";
}

// ---- the job table

const NAMED = new Set(["Waited", "Start", "Time left", "Node", "GPUs", "Workers"]);
const COLUMNS = ["Job", "State", "Waited", "Start", "Time left", "Node", "GPUs", "Workers", "Why"];

function cellsOf(job, now) {
  return [
    job.name,
    job.state,
    duration(job.waited),
    startWords(job, now),
    job.time_left === null || job.time_left === undefined ? "" : duration(job.time_left),
    job.node,
    job.gpus ? String(job.gpus) : "",
    job.kind === "worker" ? String(job.workers) : "",
    job.kind === "scheduler" ? ["the scheduler job", job.reason].filter(Boolean).join(": ") : job.reason,
  ];
}

function cause(job) {
  const own = /\[([^[\]]{1,40})\]$/.exec(job.reason);
  const text = own ? own[1] : job.reason.replace(/\d+/g, "N");
  return text.length <= 40 ? text : `${text.slice(0, 37)}...`;
}

// The few that stand for many: for each kind, state and reason the first, then the first ones.
function examples(jobs) {
  const first = new Map();
  jobs.forEach((job, index) => {
    const key = JSON.stringify([job.kind, job.state, cause(job)]);
    if (!first.has(key)) first.set(key, index);
  });
  const chosen = new Set([...first.values()].slice(0, FEW));
  for (let index = 0; index < jobs.length && chosen.size < FEW; index++) chosen.add(index);
  return [...chosen].sort((a, b) => a - b).map((index) => jobs[index]);
}

function summary(jobs) {
  const states = new Map();
  for (const job of jobs) {
    const reasons = states.get(job.state) ?? states.set(job.state, new Map()).get(job.state);
    reasons.set(cause(job), (reasons.get(cause(job)) ?? 0) + 1);
  }
  const total = (reasons) => [...reasons.values()].reduce((sum, count) => sum + count, 0);
  return [...states]
    .sort((a, b) => total(b[1]) - total(a[1]))
    .map(([state, reasons]) => {
      const named = [...reasons].filter(([reason]) => reason).sort((a, b) => b[1] - a[1]);
      const words = named.slice(0, 3).map(([reason, count]) => `${reason} (${count.toLocaleString("en-US")})`);
      return `${total(reasons).toLocaleString("en-US")} ${state}${words.length ? `: ${words.join(", ")}` : ""}`;
    })
    .join("; ");
}

function jobTable(openLog) {
  const about = el("p", { class: "hpcgpu-about" });
  const filter = el("input", { type: "search", placeholder: "Filter jobs", "aria-label": "Filter jobs" });
  const toggle = el("button", { type: "button", "aria-expanded": "false" });
  const tools = el("div", { class: "hpcgpu-tools" }, toggle, filter);
  const head = el("tr", {}, ...COLUMNS.map((column) => el("th", { scope: "col" }, column)));
  const body = el("tbody");
  const table = el("table", { "aria-label": "Jobs of the cluster" }, el("thead", {}, head), body);
  const scroll = el("div", { class: "hpcgpu-scroll", tabindex: "0", role: "region", "aria-label": "Table of jobs" }, table);
  const element = el("div", {}, about, tools, scroll);
  const rows = new Map();
  let every = false;
  let latest = null;
  toggle.addEventListener("click", () => {
    every = !every;
    draw();
  });
  filter.addEventListener("input", () => draw());

  function row(job) {
    const open = el("button", { type: "button", class: "hpcgpu-link", title: "Show the log of this job" });
    open.addEventListener("click", () => openLog(job.name));
    // a narrow table has no head
    const cells = COLUMNS.map((column) => el("td", { "data-column": NAMED.has(column) && column }));
    const state = el("span");
    cells[1].append(el("span", { class: "hpcgpu-dot", "aria-hidden": "true" }), state);
    if (openLog) cells[0].append(open);
    return { element: el("tr", {}, ...cells), places: [openLog ? open : cells[0], state, ...cells.slice(2)] };
  }

  function chosen(jobs) {
    if (jobs.length <= MANY) return jobs;
    const words = filter.value.trim().toLowerCase();
    if (words && every) return jobs.filter((job) => cellsOf(job, latest.time).join(" ").toLowerCase().includes(words));
    return every ? jobs : examples(jobs);
  }

  function draw() {
    const { jobs, time } = latest;
    const many = jobs.length > MANY;
    const shown = chosen(jobs);
    tools.hidden = about.hidden = !many;
    filter.hidden = !every;
    if (many) {
      setText(about, `${counted(jobs.length, "job")}: ${summary(jobs)}`);
      setText(toggle, every ? "Show a few jobs" : `Show all ${jobs.length.toLocaleString("en-US")} jobs`);
      toggle.setAttribute("aria-expanded", String(every));
    }
    const order = [];
    for (const job of shown) {
      const entry = rows.get(job.name) ?? rows.set(job.name, row(job)).get(job.name);
      cellsOf(job, time).forEach((text, index) => setText(entry.places[index], text));
      if (entry.element.dataset.state !== job.state) entry.element.dataset.state = job.state;
      order.push(entry.element);
    }
    if (order.length !== body.children.length || order.some((one, index) => body.children[index] !== one)) {
      body.replaceChildren(...order);
    }
    const kept = new Set(shown.map((job) => job.name));
    for (const name of rows.keys()) if (!kept.has(name)) rows.delete(name);
    scroll.hidden = jobs.length === 0;
  }

  return { element, update: (snapshot) => ((latest = snapshot), draw()) };
}

// ---- the queue over time

const WIDTH = 640;
const HEIGHT = 96;

// How many jobs waited, ran and had ended, at each time at which that changed.
export function history(jobs, now) {
  const steps = new Map();
  const step = (time, waiting, running, ended) => {
    const at = steps.get(time) ?? steps.set(time, [0, 0, 0]).get(time);
    [waiting, running, ended].forEach((change, index) => (at[index] += change));
  };
  for (const job of jobs) {
    if (!job.submitted) continue;
    const begun = started(job);
    const end = job.ended ?? (ALIVE.has(job.state) ? null : now);
    step(job.submitted, 1, 0, 0);
    if (begun) step(begun, -1, 1, 0);
    if (end) step(end, begun ? 0 : -1, begun ? -1 : 0, 1);
  }
  const counts = [0, 0, 0];
  return [...steps].sort((a, b) => a[0] - b[0]).map(([time, change]) => {
    change.forEach((by, index) => (counts[index] += by));
    return { time, waiting: counts[0], running: counts[1], ended: counts[2] };
  });
}

function timeline() {
  const picture = el("div");
  const legend = el("div", { class: "hpcgpu-legend" });
  const element = el("div", {}, picture, legend);

  function area(points, below, above, x, y) {
    let path = "";
    points.forEach((point, index) => {
      const right = index + 1 < points.length ? points[index + 1].x : x.end;
      path += `${index ? "L" : "M"}${point.x.toFixed(1)} ${y(above(point))}L${right.toFixed(1)} ${y(above(point))}`;
    });
    for (let index = points.length - 1; index >= 0; index--) {
      const right = index + 1 < points.length ? points[index + 1].x : x.end;
      path += `L${right.toFixed(1)} ${y(below(points[index]))}L${points[index].x.toFixed(1)} ${y(below(points[index]))}`;
    }
    return `${path}Z`;
  }

  function update(snapshot) {
    const steps = history(snapshot.jobs, snapshot.time);
    element.hidden = steps.length === 0;
    if (!steps.length) return;
    const first = steps[0].time;
    const over = snapshot.jobs.every((job) => !ALIVE.has(job.state));
    const last = Math.max(over ? steps[steps.length - 1].time : snapshot.time, first + 1);
    const short = last - first < 300;
    const scale = (time) => ((time - first) / (last - first)) * WIDTH;
    const columns = new Map(); // the last of each pixel is enough
    for (const step of steps) {
      const x = Math.min(WIDTH, Math.floor(scale(step.time)));
      columns.set(x, { ...step, x });
    }
    const points = [...columns.values()];
    const most = Math.max(...steps.map((step) => step.waiting + step.running + step.ended), 1);
    const y = (count) => (HEIGHT - (count / most) * (HEIGHT - 2)).toFixed(1);
    const x = { end: WIDTH };
    const now = steps[steps.length - 1];
    const label = `Jobs over time, since ${clock(first, snapshot.time)}: now ${now.waiting} wait, ${now.running} run, ${now.ended} have ended`;
    const draw = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img", "aria-label": label },
      svg("path", { class: "hpcgpu-running", d: area(points, () => 0, (p) => p.running, x, y) }),
      svg("path", { class: "hpcgpu-waiting", d: area(points, (p) => p.running, (p) => p.running + p.waiting, x, y) }),
      svg("path", {
        class: "hpcgpu-ended",
        d: area(points, (p) => p.running + p.waiting, (p) => p.running + p.waiting + p.ended, x, y),
      }),
    );
    replace(
      picture,
      el("div", { class: "hpcgpu-chart" }, el("span", { class: "hpcgpu-most" }, counted(most, "job")), draw),
      el(
        "div",
        { class: "hpcgpu-axis", "aria-hidden": "true" },
        el("span", {}, clock(first, snapshot.time, short)),
        el("span", {}, over ? clock(last, snapshot.time, short) : `now, ${clock(last, last, short)}`),
      ),
    );
    const entry = (name, text) => el("span", { class: `hpcgpu-key hpcgpu-key-${name}` }, text);
    replace(
      legend,
      entry("running", `${now.running.toLocaleString("en-US")} running`),
      entry("waiting", `${now.waiting.toLocaleString("en-US")} waiting`),
      entry("ended", `${now.ended.toLocaleString("en-US")} ended`),
    );
  }
  return { element, update };
}

// ---- the GPUs

function bar(label, share, text, extra = "") {
  const meter = el("span", { class: `hpcgpu-bar ${extra}`, role: "img", "aria-label": `${label}: ${text}` });
  const fill = el("span", { class: "hpcgpu-fill" });
  fill.style.width = `${Math.max(0, Math.min(100, share ?? 0))}%`;
  meter.append(fill);
  return el("span", { class: "hpcgpu-meter" }, meter, el("span", { class: "hpcgpu-value", "aria-hidden": "true" }, text));
}

function gpuRow(gpu, now) {
  const memory = gpu.memory_used !== null && gpu.memory_total ? [gpu.memory_used, gpu.memory_total] : null;
  const idle = gpu.idle_since !== null && gpu.idle_since !== undefined;
  const busy = gpu.utilization === null ? "not known" : `${Math.round(gpu.utilization)} %`;
  return el(
    "div",
    { class: `hpcgpu-gpu${idle ? " hpcgpu-idle" : ""}`, role: "listitem" },
    el("span", { class: "hpcgpu-name", title: [gpu.model, gpu.node].filter(Boolean).join(" on ") }, gpu.worker),
    bar("Utilisation", gpu.utilization, busy),
    bar("Memory", memory && (100 * memory[0]) / memory[1], memory ? `${gib(memory[0])} of ${gib(memory[1])} GiB` : "not known", "hpcgpu-memory"),
    el("span", { class: "hpcgpu-value" }, gpu.power === null ? "" : `${Math.round(gpu.power)} W`),
    el("span", { class: "hpcgpu-note" }, idle ? `idle for ${duration(now - gpu.idle_since)}` : ""),
  );
}

function gpuGrid(devices) {
  const kinds = { idle: "", low: "", middle: "", high: "", unknown: "" };
  const columns = 100;
  devices.forEach((gpu, index) => {
    const used = gpu.utilization;
    const kind =
      gpu.idle_since !== null ? "idle" : used === null ? "unknown" : used < 34 ? "low" : used < 67 ? "middle" : "high";
    kinds[kind] += `M${(index % columns) * 10} ${Math.floor(index / columns) * 10}h8v8h-8z`;
  });
  const rows = Math.ceil(devices.length / columns);
  const paths = Object.entries(kinds).filter(([, path]) => path);
  const label = `${counted(devices.length, "GPU")}, a square for each, by job`;
  return svg(
    "svg",
    { class: "hpcgpu-grid", viewBox: `0 0 ${columns * 10} ${rows * 10}`, preserveAspectRatio: "xMinYMin meet", role: "img", "aria-label": label },
    ...paths.map(([kind, path]) => svg("path", { class: `hpcgpu-gpu-${kind}`, d: path })),
  );
}

function mean(values) {
  const known = values.filter((value) => value !== null && value !== undefined);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

function gpuWords(devices) {
  const idle = devices.filter((gpu) => gpu.idle_since !== null);
  const used = mean(devices.map((gpu) => gpu.utilization));
  const memory = mean(devices.map((gpu) => gpu.memory_used));
  const total = mean(devices.map((gpu) => gpu.memory_total));
  return [
    counted(devices.length, "GPU"),
    idle.length ? `${idle.length.toLocaleString("en-US")} idle` : "none idle",
    used === null ? "" : `mean utilisation ${Math.round(used)} %`,
    memory === null || !total ? "" : `mean memory ${gib(memory)} of ${gib(total)} GiB`,
  ]
    .filter(Boolean)
    .join(", ");
}

// The jobs that have idle GPUs, the longest idle first.
function idleJobs(devices, now) {
  const jobs = new Map();
  for (const gpu of devices.filter((one) => one.idle_since !== null)) {
    const entry = jobs.get(gpu.job) ?? jobs.set(gpu.job, { name: gpu.job, count: 0, since: now }).get(gpu.job);
    entry.count += 1;
    entry.since = Math.min(entry.since, gpu.idle_since);
  }
  return [...jobs.values()].sort((a, b) => a.since - b.since);
}

function gpus() {
  const element = el("div");
  function update(snapshot) {
    const devices = snapshot.devices;
    element.hidden = devices.length === 0;
    if (!devices.length) return;
    const parts = [el("p", { class: "hpcgpu-about" }, gpuWords(devices))];
    if (devices.length > MANY_GPUS) {
      const idle = idleJobs(devices, snapshot.time);
      const words = idle.slice(0, FEW).map((job) => `${job.name} (${counted(job.count, "GPU")}, ${duration(snapshot.time - job.since)})`);
      const more = idle.length > FEW ? ` and ${counted(idle.length - FEW, "job")} more` : "";
      const key = (name, text) => el("span", { class: `hpcgpu-key hpcgpu-key-gpu-${name}` }, text);
      parts.push(
        gpuGrid(devices),
        el("div", { class: "hpcgpu-legend" }, key("high", "from 67 %"), key("middle", "34 to 66 %"), key("low", "below 34 %"), key("idle", "idle")),
        idle.length ? el("p", { class: "hpcgpu-note" }, `Idle: ${words.join(", ")}${more}`) : null,
      );
    } else {
      const list = el("div", { role: "list", class: "hpcgpu-gpus", "aria-label": "GPUs by job" });
      const titles = ["GPU of", "Utilisation", "Memory", "Power", ""].map((text) => el("span", {}, text));
      list.append(el("div", { class: "hpcgpu-gpu hpcgpu-titles", "aria-hidden": "true" }, ...titles));
      let job = null;
      for (const gpu of devices) {
        if (gpu.job !== job) {
          job = gpu.job;
          const model = gpu.model ? `, ${gpu.model}` : "";
          list.append(el("div", { class: "hpcgpu-job" }, `${job}${gpu.node ? ` on ${gpu.node}` : ""}${model}`));
        }
        list.append(gpuRow(gpu, snapshot.time));
      }
      parts.push(list);
    }
    replace(element, ...parts);
  }
  return { element, update };
}

// ---- header, groups, warnings

function header() {
  const name = el("span", { class: "hpcgpu-title" });
  const last = el("span", { class: "hpcgpu-about", hidden: true }, "last known: ");
  const state = el("span", { class: "hpcgpu-state" });
  const link = el("a", { class: "hpcgpu-dashboard", target: "_blank", rel: "noopener noreferrer" }, "Dask dashboard");
  const facts = el("div", { class: "hpcgpu-facts" });
  const element = el("div", { class: "hpcgpu-head" }, el("div", { class: "hpcgpu-line" }, name, last, state, link), facts);

  function update(snapshot) {
    setText(name, snapshot.name);
    setText(state, snapshot.state);
    state.dataset.state = snapshot.state;
    const address = safeLink(snapshot.dashboard);
    link.hidden = !address;
    if (address && link.getAttribute("href") !== address) link.setAttribute("href", address);
    const shown = [
      ["Workers", snapshot.workers.toLocaleString("en-US")],
      ["GPUs", snapshot.gpus.toLocaleString("en-US")],
      ["Time left", snapshot.time_left === null ? "not known" : duration(snapshot.time_left)],
      ["GPU hours", `${snapshot.gpu_hours.toFixed(snapshot.gpu_hours < 10 ? 2 : 0)}`],
    ];
    if (snapshot.state === "closed" || snapshot.state === "ended") shown.splice(2, 1);
    replace(facts, ...shown.map(([term, text]) => el("div", {}, el("div", { class: "hpcgpu-term" }, term), el("div", { class: "hpcgpu-fact" }, text))));
  }
  return { element, update, still: (on) => (last.hidden = !on) };
}

function groupWords(group) {
  const wants = group.target === null ? "no size yet" : counted(group.target, "job");
  const adapts = group.maximum === null ? "" : ` (adapts from ${group.minimum ?? 0} to ${group.maximum} jobs)`;
  const hours = group.maximum_gpu_hours === null ? "" : `, ${group.gpu_hours.toFixed(1)} of ${group.maximum_gpu_hours} GPU hours used`;
  return `${group.name}: ${wants}${adapts}${hours}${group.reason ? `; ${group.reason}` : ""}`;
}

function messages() {
  const alert = el("div", { role: "alert" });
  const others = el("div");
  const before = new Map();
  function show(place, lines) {
    if (JSON.stringify(lines) === before.get(place)) return; // a screen reader reads it once
    before.set(place, JSON.stringify(lines));
    replace(place, ...lines.map(([kind, text]) => el("p", { class: `hpcgpu-${kind}` }, text)));
  }
  function update(snapshot) {
    show(alert, [
      ...snapshot.groups.filter((group) => group.paused).map((group) => ["warning", `Group ${group.name} is paused: ${group.paused}`]),
      ...(snapshot.end ? [["warning", snapshot.end]] : []),
      ...snapshot.warnings.map((text) => ["warning", text]),
      ...(snapshot.problem ? [["warning", snapshot.problem]] : []),
    ]);
    // how long the restart takes changes with each snapshot, so it is no alert
    show(others, [...(snapshot.restart ?? []).map((text) => ["warning", text]), ...snapshot.groups.map((group) => ["group", groupWords(group)])]);
  }
  return { element: el("div", {}, alert, others), update };
}

// ---- the log of a job

function logPanel(read) {
  const title = el("span", { class: "hpcgpu-heading" });
  const text = el("pre", { tabindex: "0" });
  const again = el("button", { type: "button" }, "Read again");
  const close = el("button", { type: "button" }, "Close");
  const element = el("section", { class: "hpcgpu-log", hidden: true, "aria-label": "Log of a job" }, el("div", { class: "hpcgpu-line" }, title, again, close), text);
  let name = "";
  let back = null;
  let empty = false;
  async function show() {
    empty = false;
    const of = name;
    setText(title, `Log of ${of}`);
    element.setAttribute("aria-label", `Log of ${of}`);
    try {
      const log = await read(of, (note) => of === name && setText(text, note));
      if (of !== name) return;
      empty = !log;
      setText(text, log || "Nothing is written yet.");
    } catch (error) {
      if (of === name) setText(text, `The log cannot be read: ${error.message}`);
    }
    text.scrollTop = text.scrollHeight;
  }
  again.addEventListener("click", show);
  const hide = () => {
    element.hidden = true;
    back?.focus();
  };
  close.addEventListener("click", hide);
  element.addEventListener("keydown", (event) => event.key === "Escape" && hide());
  return {
    element,
    open: (job) => {
      name = job;
      back = document.activeElement;
      element.hidden = false;
      setText(text, "Reading ...");
      show();
    },
    // A job that has just started has an empty log: it is read again until there is something.
    update: () => {
      if (empty && !element.hidden) show();
    },
  };
}

// ---- the controls

function number(label, value) {
  const input = el("input", { type: "number", min: "0", step: "1", value: String(value), "aria-label": label });
  return input;
}

function units(label) {
  return el("select", { "aria-label": label }, el("option", { value: "jobs" }, "jobs"), el("option", { value: "gpus" }, "GPUs"));
}

function wholeNumber(input) {
  const value = Number(input.value);
  if (input.value.trim() === "" || !Number.isInteger(value) || value < 0) {
    throw new Error(`${input.getAttribute("aria-label")}: write a whole number, such as 2`);
  }
  return value;
}

function controls(actions) {
  const group = el("select", { "aria-label": "Worker group" });
  const groupLabel = el("label", { hidden: true }, "of ", group);
  const size = number("Size of the cluster", 1);
  const sizeUnit = units("Unit of the size");
  const least = number("Fewest", 0);
  const most = number("Most", 1);
  const adaptUnit = units("Unit of the limits");
  const idle = el("input", { type: "text", size: "8", placeholder: "learned", "aria-label": "Keep a job without work for", title: "Such as 10m or 1h. Empty: minutes in your first pauses, then as long as your pauses teach" });
  const statusLine = el("p", { class: "hpcgpu-said", role: "status", "aria-live": "polite" });
  const failed = el("p", { class: "hpcgpu-error", role: "alert", hidden: true });
  const confirm = el("div", { class: "hpcgpu-confirm", role: "alertdialog", hidden: true });
  const bars = el("div", { class: "hpcgpu-controls" });
  const element = el("div", {}, bars, confirm, statusLine, failed);
  let latest = null;
  let filled = false;
  let leave = () => {};
  confirm.addEventListener("keydown", (event) => event.key === "Escape" && leave());

  // Run what the user asked for; say that it is done, or why not.
  async function act(button, doing, done, request) {
    button.disabled = true;
    failed.hidden = true;
    setText(statusLine, doing);
    try {
      await request((note) => setText(statusLine, note));
      setText(statusLine, done);
    } catch (error) {
      setText(statusLine, "");
      setText(failed, error.message);
      failed.hidden = false;
    }
    button.disabled = false;
  }

  function form(name, label, request, ...parts) {
    const button = el("button", { type: "submit" }, name);
    const one = el("form", { "aria-label": label, novalidate: true }, ...parts, button);
    one.addEventListener("submit", (event) => {
      event.preventDefault();
      act(button, `${name} ...`, `${name}: done.`, request);
    });
    return one;
  }

  const chosen = () => ({ worker_group: group.value || "default" });
  if (actions.scale) {
    const request = async (note) => actions.scale({ [sizeUnit.value]: wholeNumber(size), ...chosen() }, note);
    bars.append(form("Scale", "Set the size", request, el("span", {}, "Size "), size, sizeUnit));
  }
  if (actions.adapt) {
    const request = async (note) =>
      actions.adapt({ [`minimum_${adaptUnit.value}`]: wholeNumber(least), [`maximum_${adaptUnit.value}`]: wholeNumber(most), ...(idle.value.trim() && { idle_timeout: idle.value.trim() }), ...chosen() }, note);
    bars.append(form("Adapt", "Let the work decide the size", request, el("span", {}, "From "), least, el("span", {}, " to "), most, adaptUnit, el("span", {}, " idle for "), idle));
  }
  const ends = el("span", { class: "hpcgpu-ends" });
  bars.append(groupLabel, ends);

  function ask(button, question, name, doing, done, request) {
    const yes = el("button", { type: "button", class: "hpcgpu-danger" }, name);
    const no = el("button", { type: "button" }, "Cancel");
    const hide = () => {
      confirm.hidden = true;
      button.focus();
    };
    no.addEventListener("click", hide);
    leave = hide;
    yes.addEventListener("click", () => {
      hide();
      act(button, doing, done, request);
    });
    confirm.setAttribute("aria-label", question);
    replace(confirm, el("span", {}, question), yes, no);
    confirm.hidden = false;
    yes.focus();
  }

  const detach = el("button", { type: "button", title: "The cluster continues without its program" }, "Detach");
  if (actions.detach) {
    detach.addEventListener("click", () =>
      ask(detach, "Detach? The cluster continues without its program.", "Detach", "Detaching ...", "Detached.", actions.detach),
    );
    ends.append(detach);
  }
  if (actions.stop) {
    const button = el("button", { type: "button" }, "Stop");
    button.addEventListener("click", () => {
      const jobs = latest.jobs.filter((job) => ALIVE.has(job.state)).length;
      const question = `Stop the cluster? Its ${counted(jobs, "job")} end${jobs === 1 ? "s" : ""}, and the data on its workers is lost.`;
      ask(button, question, "Stop the cluster", "Stopping ...", "Stopped.", actions.stop);
    });
    ends.append(button);
  }

  function update(snapshot) {
    latest = snapshot;
    const names = snapshot.groups.map((one) => one.name);
    if (names.join("\n") !== [...group.options].map((option) => option.value).join("\n")) {
      const before = group.value;
      replace(group, ...names.map((name) => el("option", { value: name }, name)));
      if (names.includes(before)) group.value = before;
    }
    groupLabel.hidden = names.length < 2;
    const first = snapshot.groups[0];
    if (!filled && first && first.target !== null) {
      size.value = String(first.target);
      least.value = String(first.minimum ?? 0);
      most.value = String(first.maximum ?? Math.max(1, first.target));
      filled = true;
    }
    detach.hidden = Boolean(actions.remote && snapshot.detached); // a program can also leave a detached cluster
    bars.hidden = ["closed", "ended"].includes(snapshot.state);
    if (bars.hidden) confirm.hidden = true;
  }
  return { element, update };
}

// ---- the whole

// Draw into an element. `actions` are functions that return promises: scale(body, note), adapt(body, note), stop(note),
// detach(note), log(job, note); `note` shows a text while it takes long. A rejected promise's message is shown.
export function clusterView(root, { actions = {} } = {}) {
  const log = actions.log ? logPanel(actions.log) : null;
  const table = jobTable(log ? log.open : null);
  const parts = { header: header(), controls: controls(actions), messages: messages(), table, timeline: timeline(), gpus: gpus() };
  const stale = el("p", { class: "hpcgpu-warning", role: "status", hidden: true });
  const section = (name, part, more) =>
    el("section", { "aria-label": name }, el("div", { class: "hpcgpu-heading", role: "heading", "aria-level": "3" }, name), part.element, more);
  const sections = { jobs: section("Jobs", table, log?.element), timeline: section("Queue over time", parts.timeline), gpus: section("GPUs", parts.gpus) };
  const wait = el("p", { class: "hpcgpu-about" }, "Querying the cluster ...");
  const content = el("div", { hidden: true }, parts.header.element, stale, parts.controls.element, parts.messages.element, ...Object.values(sections));
  const panel = el("div", { class: "hpcgpu", role: "group", "aria-label": "Cluster" }, wait, content);
  root.append(panel);
  return {
    element: panel,
    update(snapshot) {
      wait.hidden = true;
      content.hidden = false;
      panel.setAttribute("aria-label", `Cluster ${snapshot.name}`);
      for (const part of Object.values(parts)) part.update(snapshot);
      log?.update();
      sections.jobs.hidden = snapshot.jobs.length === 0;
      for (const name of ["timeline", "gpus"]) sections[name].hidden = parts[name].element.hidden;
    },
    // Whether nobody updates it, and nobody can do what the controls ask for.
    still(on) {
      parts.controls.element.hidden = on;
      parts.header.still(on);
    },
    // What is known of the age of the picture, or that the cluster cannot be queried; empty: nothing.
    note(text) {
      setText(wait.hidden ? stale : wait, text || (wait.hidden ? "" : "Querying the cluster ..."));
      stale.hidden = !wait.hidden || !text;
    },
    destroy() {
      panel.remove();
    },
  };
}

// ---- the extension of the Jupyter server

// The address below which the Jupyter server that served this page has its pages; "" where none did.
export function serverBase() {
  const config = document.getElementById("jupyter-config-data");
  if (config) {
    try {
      return JSON.parse(config.textContent).baseUrl ?? "";
    } catch {
      return "";
    }
  }
  return document.body?.dataset?.baseUrl ?? "";
}

// Send a request to the extension. A failure is an Error with the server's own words.
export async function request(address, body) {
  const token = /(?:^|; )_xsrf=([^;]*)/.exec(document.cookie)?.[1];
  const headers = { Accept: "application/json", ...(token ? { "X-XSRFToken": decodeURIComponent(token) } : {}) };
  const post = body === undefined ? {} : { method: "POST", body: JSON.stringify(body) };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const answer = await fetch(address, { credentials: "same-origin", headers, ...post });
  const text = await answer.text();
  let content = null;
  try {
    content = text ? JSON.parse(text) : null;
  } catch {
    content = null;
  }
  if (!answer.ok) throw new Error(content?.message || `the Jupyter server answered ${answer.status} ${answer.statusText}`);
  return content;
}

export function clusterAddress(base, name) {
  return `${base.replace(/\/*$/, "/")}hpcgpu/api/clusters/${encodeURIComponent(name)}`;
}

export function inboxAddress(base, inbox) {
  return `${base.replace(/\/*$/, "/")}hpcgpu/api/inboxes/${encodeURIComponent(inbox)}`;
}

// Whether a snapshot is of the cluster that was shown before, and not of a later one of its name.
export function sameCluster(before, after) {
  const ids = before.jobs.map((job) => job.id ?? job).filter(Boolean);
  return before.directory === after.directory && (!ids.length || after.jobs.some((job) => ids.includes(job.id)));
}

export function serverActions(base, name) {
  const address = clusterAddress(base, name);
  return {
    remote: true, // no program makes the request: none leaves the cluster
    scale: (body) => request(`${address}/scale`, body),
    adapt: (body) => request(`${address}/adapt`, body),
    detach: () => request(`${address}/detach`, {}),
    stop: () => request(`${address}/stop`, {}),
    log: async (job) => (await request(`${address}/logs?job=${encodeURIComponent(job)}`)).text,
  };
}
