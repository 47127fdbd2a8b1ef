// The page hpcgpu/ of a Jupyter server: the clusters of the user, one of them in detail, and a form that starts another.
//
// All that comes from the server reaches the page as text: by textContent, value and attributes, never as HTML.

import { clusterAddress, clusterView, duration, request, serverActions } from "./panel.js";

const OFTEN = 3000; // milliseconds between two pictures of one cluster
const SELDOM = 10000; // between two lists of all

const base = document.body.dataset.baseUrl;
const api = `${base}hpcgpu/api/`;

function el(tag, properties = {}, ...children) {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
}

function cells(tag, texts) {
  return texts.map((text) => el(tag, {}, text));
}

// ---- the list

const states = new Map(); // of the clusters in the list
const titles = ["State", "Workers", "GPUs", "Time left", "GPU hours", "Batch system"];
const rows = el("tbody");
const table = el("table", { hidden: true }, el("thead", {}, el("tr", {}, ...cells("th", ["Name", ...titles]))), rows);
const none = el("p", { className: "quiet", textContent: "Loading …" });
const listFailed = el("p", { className: "failed", hidden: true });
listFailed.setAttribute("role", "alert");

function row(cluster) {
  const open = el("button", { type: "button", className: "link", textContent: cluster.name });
  open.addEventListener("click", () => select(cluster.name));
  const line = el("tr", {}, el("td", {}, open));
  if (cluster.name === selected) line.setAttribute("aria-current", "true");
  if (cluster.state === "") {
    line.append(el("td", { className: "failed", colSpan: 6, textContent: cluster.problem }));
    return line;
  }
  const left = cluster.time_left === null ? "" : duration(cluster.time_left);
  const texts = [cluster.state, String(cluster.workers), String(cluster.gpus), left, cluster.gpu_hours.toFixed(2), cluster.system];
  line.append(...cells("td", texts));
  titles.forEach((title, number) => (line.cells[number + 1].dataset.title = title)); // shown where there is no room for a head
  return line;
}

async function list() {
  try {
    const { clusters } = await request(`${api}clusters`);
    const focused = document.activeElement?.closest("tbody") === rows ? document.activeElement.textContent : null;
    rows.replaceChildren(...clusters.map(row));
    for (const cluster of clusters) states.set(cluster.name, cluster.state);
    if (focused !== null) [...rows.querySelectorAll("button")].find((button) => button.textContent === focused)?.focus();
    table.hidden = clusters.length === 0;
    none.hidden = clusters.length > 0;
    none.textContent = "No clusters. Start one below, or in a notebook.";
    listFailed.hidden = true;
    if (selected === null && clusters.length > 0 && clusters[0].state !== "") select(clusters[0].name);
  } catch (error) {
    listFailed.textContent = `The list could not be updated: ${error.message}`;
    listFailed.hidden = false;
  }
}

// ---- one cluster

const detail = el("section");
let selected = null;
let view = null;

function code(name) {
  const text = `import hpcgpu\n\nclient = hpcgpu.connect(${JSON.stringify(name)})`;
  const copy = el("button", { type: "button", textContent: "Copy" });
  copy.addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText(text);
      copy.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(copy.previousSibling); // without https there is no clipboard
      copy.textContent = "Selected: press Ctrl-C";
    }
  });
  return [el("h2", { textContent: "Connect in a notebook" }), el("pre", { textContent: text }), copy];
}

function select(name) {
  selected = name;
  location.hash = encodeURIComponent(name);
  for (const line of rows.children) line.toggleAttribute("aria-current", false);
  for (const line of rows.children) if (line.querySelector("button").textContent === name) line.setAttribute("aria-current", "true");
  const picture = el("div");
  detail.replaceChildren(el("h2", { textContent: "Cluster" }), picture, ...code(name));
  const actions = serverActions(base, name);
  const { detach, stop } = actions;
  actions.detach = () => detach().finally(show);
  actions.stop = async (...given) => {
    await stop(...given);
    await list();
  };
  view = clusterView(picture, { actions });
  show();
}

async function show() {
  const [name, shown] = [selected, view];
  if (name === null) return;
  try {
    const snapshot = await request(clusterAddress(base, name));
    if (shown !== view) return;
    shown.update(snapshot);
    shown.note("");
    if (states.get(name) !== snapshot.state) await list(); // it would show the earlier state for some seconds
  } catch (error) {
    if (shown === view) shown.note(error.message);
  }
}

// ---- a new one

const fields = {
  name: el("input", { placeholder: "demo", autocomplete: "off" }),
  profile: el("select"),
  system: el("select"),
  queue: el("input"),
  account: el("input"),
  walltime: el("input", { placeholder: "2h" }),
  gpus_per_node: el("input", { inputMode: "numeric", placeholder: "as the profile, else 1" }),
  gpu_type: el("input"),
  cores: el("input", { inputMode: "numeric" }),
  memory: el("input", { placeholder: "60GB" }),
  scheduler_queue: el("input", { placeholder: "as the worker jobs" }),
  jobs: el("input", { inputMode: "numeric", value: "1" }),
  idle_timeout: el("input", { placeholder: "30m" }),
};
const labels = {
  name: "Name",
  profile: "Profile or saved form",
  system: "Batch system",
  queue: "Queue",
  account: "Account",
  walltime: "Walltime",
  gpus_per_node: "GPUs per node",
  gpu_type: "Type of GPU",
  cores: "Cores per node",
  memory: "Memory per node",
  scheduler_queue: "Queue of the scheduler job",
  jobs: "Worker jobs",
  idle_timeout: "End when idle for",
};
const start = el("button", { type: "submit", textContent: "Start" });
const save = el("button", { type: "button", textContent: "Save this form" });
const notice = el("p");
notice.setAttribute("role", "status");
const labelled = Object.entries(fields).map(([name, field]) => el("label", {}, labels[name], Object.assign(field, { name })));
const form = el("form", { noValidate: true }, ...labelled, el("div", { className: "buttons" }, start, save));
let profiles = [];

function options(save) {
  const given = Object.entries(fields).filter(([name, field]) => name !== "name" && field.value !== "");
  const value = (field) => (field.inputMode === "numeric" && /^\d+$/.test(field.value) ? Number(field.value) : field.value);
  const { scheduler_queue: queue, ...found } = Object.fromEntries(given.map(([name, field]) => [name, value(field)]));
  if (queue !== undefined) found.scheduler = { queue };
  if (found.profile !== undefined || (save && found.system === "auto")) delete found.system; // the profile says it
  return found;
}

async function offer() {
  try {
    const offered = await request(`${api}profiles`);
    const chosen = fields.profile.value;
    profiles = offered.profiles;
    const mine = profiles.filter((one) => one.yours);
    const group = (label, found) => Object.assign(el("optgroup", { label }), { hidden: found.length === 0 });
    const filled = (element, found) => (element.append(...found.map((one) => el("option", { value: one.name, textContent: one.name }))), element);
    fields.profile.replaceChildren(
      el("option", { value: "", textContent: "none" }),
      filled(group("Yours", mine), mine),
      filled(group("Sites", profiles), profiles.filter((one) => !one.yours)),
    );
    fields.profile.value = chosen;
    fields.system.replaceChildren(...["auto", ...offered.systems].map((name) => el("option", { value: name, textContent: name })));
    if (offered.problems.length > 0) showNotice(offered.problems.join("\n"), true);
  } catch (error) {
    showNotice(error.message, true);
  }
}

function showNotice(text, failed = false) {
  notice.textContent = text;
  notice.className = failed ? "failed" : "quiet";
}

fields.profile.addEventListener("change", () => {
  const profile = profiles.find((one) => one.name === fields.profile.value);
  fields.system.disabled = profile !== undefined;
  const needs = (profile?.needs ?? []).join(", ");
  showNotice(profile ? `${profile.about}${needs ? ` It needs ${needs}.` : ""}` : "");
});

form.addEventListener("submit", async (event) => {
  event.preventDefault();
  const name = fields.name.value;
  start.disabled = true;
  showNotice(`Starting ${name} …`);
  try {
    const answer = await request(`${api}clusters`, { name, options: options(false) });
    showNotice(`The queue has accepted the jobs of ${name}.${answer.messages ? `\n${answer.messages}` : ""}`);
    await list();
    select(name);
  } catch (error) {
    showNotice(`${name || "The cluster"} was not started: ${error.message}`, true);
  } finally {
    start.disabled = false;
  }
});

save.addEventListener("click", async () => {
  const name = fields.name.value;
  try {
    await request(`${api}profiles`, { name, options: options(true) });
    await offer();
    fields.profile.value = name;
    showNotice(`Saved as your profile ${name}: hpcgpu start NAME --profile ${name} uses it too.`);
  } catch (error) {
    showNotice(`The form was not saved: ${error.message}`, true);
  }
});

// ---- the whole

function forever(what, pause) {
  const again = async () => {
    if (!document.hidden) await what();
    setTimeout(again, pause);
  };
  again();
}

const main = document.getElementById("main");
main.replaceChildren(listFailed, none, table, detail, el("h2", { textContent: "Start a cluster" }), form, notice);
offer();
forever(list, SELDOM);
forever(show, OFTEN);
document.addEventListener("visibilitychange", () => !document.hidden && (list(), show()));
if (location.hash.length > 1) select(decodeURIComponent(location.hash.slice(1)));
