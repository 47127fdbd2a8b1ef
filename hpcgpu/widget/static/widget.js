import { clusterAddress, clusterView, request, sameCluster, serverActions, serverBase } from "./draw.js";

// The widget of a notebook, as anywidget calls it. hpcgpu/widget/notebook.py puts draw.js in the place of the import.
//
// Updates come from a thread of the kernel. Requests of the user go to the extension of the Jupyter server if it knows
// this cluster, because it also answers while a cell runs and after the kernel has ended; else to the kernel.

const SLOW = 3000; // milliseconds without an answer of the kernel, after which the user is told why
const OLD = 45000; // milliseconds without a new picture, after which the user is told so
const POLL = 5000;
const SEEN = 120000; // milliseconds after which the kernel is told that somebody looks
const IDLE = 2000; // milliseconds within which a kernel that runs no cell begins with a request

class Busy extends Error {}

function kernelActions(model) {
  const open = new Map();
  let last = 0;
  const mine = Math.random().toString(36).slice(2); // several views share the connection
  const answered = (message) => {
    const there = open.get(message?.id);
    if (!there) return;
    if (message.begun) {
      there.begun = true;
      return;
    }
    open.delete(message.id);
    if (message.error) there.reject(new Error(message.error));
    else there.resolve(message.result);
  };
  model.on("msg:custom", answered);
  // If it is `urgent`, a kernel that does not begin with it is `Busy`; it still does it later.
  const ask = (what, body, note, urgent = false) =>
    new Promise((resolve, reject) => {
      const id = `${mine}-${(last += 1)}`;
      open.set(id, { resolve, reject, begun: false });
      try {
        model.send({ id, do: what, body });
      } catch (error) {
        open.delete(id);
        reject(urgent ? new Busy() : new Error(`The kernel has ended: ${error.message}`));
        return;
      }
      const told = "The kernel is busy. It handles this request when the cell has ended.";
      const waits = () => open.has(id) && !open.get(id).begun;
      if (urgent) setTimeout(() => waits() && reject(new Busy()), IDLE);
      else setTimeout(() => waits() && note?.(told), SLOW);
    });
  const actions = {
    scale: (body, note) => ask("scale", body, note),
    adapt: (body, note) => ask("adapt", body, note),
    stop: (note, urgent) => ask("stop", {}, note, urgent),
    detach: (note) => ask("detach", {}, note),
    log: (job, note) => ask("log", { job }, note),
  };
  return { actions, forget: () => model.off("msg:custom", answered) };
}

// The actions of the server extension, if it knows this very cluster.
async function findServer(snapshot) {
  const base = serverBase();
  if (!base) return null;
  try {
    const there = await request(clusterAddress(base, snapshot.name));
    return sameCluster(snapshot, there) ? { base, ...serverActions(base, snapshot.name) } : null;
  } catch {
    return null; // no extension, or not on this machine
  }
}

function render({ model, el }) {
  const { actions: kernel, forget } = kernelActions(model);
  let server = null;
  let searched = false;
  let came = Date.now();
  let fresh = false;
  const use = (what) => (...given) => (server?.[what] ?? kernel[what])(...given);
  const actions = Object.fromEntries(Object.keys(kernel).map((what) => [what, use(what)]));
  // The program that has the cluster closes it. If it is busy the server stops the cluster; to close it twice does no harm.
  actions.stop = async (note) => {
    try {
      return await kernel.stop(note, server !== null);
    } catch (error) {
      if (error instanceof Busy) return server.stop();
      throw error;
    }
  };
  const view = clusterView(el, { actions });

  const show = (snapshot) => {
    const link = server && snapshot.dashboard && !snapshot.dashboard.startsWith("/");
    const path = `${server?.base.replace(/\/*$/, "/")}hpcgpu/dashboard/${encodeURIComponent(snapshot.name)}/status`;
    view.update(link ? { ...snapshot, dashboard: path } : snapshot);
  };
  const changed = async () => {
    const snapshot = model.get("snapshot");
    if (!snapshot?.name) return;
    fresh = searched; // the first one may come from the file of a notebook
    came = fresh ? Date.now() : Math.min(Date.now(), 1000 * snapshot.time);
    view.still(false);
    show(snapshot);
    if (searched) return;
    searched = true;
    if (old()) await watch();
    server = await findServer(snapshot);
    if (server) show(model.get("snapshot"));
    if (old()) await watch();
  };
  const old = () => Date.now() - came >= OLD;
  const problem = () => view.note(model.get("problem"));

  // Where the kernel sends nothing more, the server is asked; where there is none, the age of the picture is told.
  const watch = async () => {
    const snapshot = model.get("snapshot");
    if (!snapshot?.name || ["closed", "ended"].includes(snapshot.state) || !old()) return problem();
    try {
      if (!server) throw new Error("");
      const newest = await request(clusterAddress(server.base, snapshot.name));
      view.still(false);
      view.update(newest);
      view.note("");
    } catch (error) {
      const time = new Date(snapshot.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
      view.still(!server && !fresh);
      view.note(`This view was last updated at ${time}. ${error.message || "The kernel sends no updates."}`);
    }
  };

  model.on("change:snapshot", changed);
  model.on("change:problem", problem);
  const timer = setInterval(watch, POLL);
  const looking = setInterval(() => {
    if (document.visibilityState !== "visible") return;
    try {
      model.send({ do: "seen" });
    } catch {
      // the kernel is gone
    }
  }, SEEN);
  model.send({ do: "shown" });
  changed();
  problem();
  return () => {
    clearInterval(timer);
    clearInterval(looking);
    model.off("change:snapshot", changed);
    model.off("change:problem", problem);
    try {
      model.send({ do: "hidden" });
    } catch {
      // the kernel is gone
    }
    forget();
    view.destroy();
  };
}

export default { render };
