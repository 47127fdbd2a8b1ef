import { clusterAddress, clusterView, request, sameCluster, serverActions, serverBase } from "./draw.js";

// The widget of a notebook, as anywidget calls it. hpcgpu/widget/notebook.py puts draw.js in the place of the import.
//
// Updates come from a thread of the kernel. Requests of the user go to the extension of the Jupyter server if it knows
// this cluster, because it also answers while a cell runs and after the kernel has ended; else to the kernel.

const SLOW = 3000; // milliseconds without an answer of the kernel, after which the user is told why
const SILENT = 6000; // milliseconds without a new picture of the kernel, after which the server is asked
const OLD = 45000; // milliseconds without a new picture, after which the user is told so where no server answers
const POLL = 3000;
const SEARCHES = 10; // the server may know a cluster later than its kernel
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
  let searches = 0;
  let heard = 0; // when the kernel sent its last picture to this view
  let gone = false; // whether the kernel has ended
  let shown = null;
  let asking = null;
  const lives = () => !["closed", "ended"].includes(shown.state);
  const doing = {
    ...Object.fromEntries(Object.keys(kernel).map((what) => [what, (...given) => (server?.[what] ?? kernel[what])(...given)])),
    // The program that has the cluster closes it. If it is busy the server stops the cluster; to close it twice does no harm.
    stop: async (note) => {
      try {
        return await kernel.stop(note, server !== null);
      } catch (error) {
        if (error instanceof Busy) return server.stop();
        throw error;
      }
    },
  };
  const thenLook = (request) => async (...given) => {
    try {
      return await request(...given);
    } finally {
      look();
    }
  };
  const actions = { ...doing, ...Object.fromEntries(["scale", "adapt", "stop", "detach"].map((what) => [what, thenLook(doing[what])])) };
  const view = clusterView(el, { actions });

  const draw = (snapshot) => {
    shown = snapshot;
    const path = `${server?.base.replace(/\/*$/, "/")}hpcgpu/dashboard/${encodeURIComponent(snapshot.name)}/status`;
    const link = server && snapshot.dashboard && !snapshot.dashboard.startsWith("/");
    view.still(lives() && !server && !heard);
    view.update(link ? { ...snapshot, dashboard: path } : snapshot);
  };
  const changed = () => {
    heard = Date.now();
    draw(model.get("snapshot"));
    problem();
  };
  const problem = () => view.note(model.get("problem"));

  const search = async () => {
    if (server || searches >= SEARCHES) return;
    searches += 1;
    server = await findServer(shown);
    if (server) draw(shown);
  };
  // Show what the server knows now, unless the kernel sends a picture meanwhile; where there is no server, tell the age.
  const ask = async () => {
    const before = heard;
    await search();
    try {
      if (!server) throw new Error("");
      const newest = await request(clusterAddress(server.base, shown.name));
      if (heard !== before) return;
      if (!sameCluster(shown, newest)) {
        server = null;
        throw new Error("A later cluster has its name.");
      }
      draw(newest);
      view.note("");
    } catch (error) {
      if (heard !== before || !lives() || (!gone && Date.now() - (heard || 1000 * shown.time) < OLD)) return;
      view.still(!server && !heard);
      const time = new Date(shown.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
      view.note(`This view was last updated at ${time}. ${error.message || "The kernel sends no updates."}`);
    }
  };
  // One request at a time; what changed during one is asked for again.
  const look = async () => {
    if (!shown) return;
    await asking;
    asking ??= ask().finally(() => (asking = null));
    await asking;
  };
  const watch = () => {
    if (!shown || document.visibilityState !== "visible") return;
    if (lives() && Date.now() - heard > SILENT) look();
    else search();
  };
  const lost = () => {
    gone = true;
    heard = 0;
    if (shown) draw(shown);
    look();
  };

  model.on("change:snapshot", changed);
  model.on("change:problem", problem);
  model.on("comm_live_update", lost); // the kernel restarts
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
  if (model.get("snapshot")?.name) draw(model.get("snapshot")); // it may come from the file of a notebook
  problem();
  look();
  return () => {
    clearInterval(timer);
    clearInterval(looking);
    model.off("change:snapshot", changed);
    model.off("change:problem", problem);
    model.off("comm_live_update", lost);
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
