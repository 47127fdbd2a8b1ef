import { clusterAddress, clusterView, inboxAddress, over, request, sameCluster, serverActions, serverBase } from "./panel.js";

// The widget of a notebook, as anywidget calls it. hpcgpu/widget/notebook_widget.py puts panel.js in the place of the import.
//
// Updates come from a thread of the kernel. Requests of the user go to the extension of the Jupyter server if it knows
// this cluster, because it also answers while a cell runs and after the kernel has ended; else to the kernel. The
// extension passes them on to it, because a kernel that runs a cell takes none from JupyterLab.

const SLOW = 3000; // milliseconds without an answer of the kernel, after which the user is told why
const SILENT = 6000; // milliseconds without a new picture of the kernel, after which the server is asked
const OLD = 45000; // milliseconds without a new picture, after which the user is told so where no server answers
const POLL = 3000;
const SEARCHES = 10; // the server may know a cluster later than its kernel
const SEEN = 120000; // milliseconds after which the kernel is told that somebody looks
const REDRAWN = 1000; // milliseconds within which an element that is taken off the page gives way to a new one
const IDLE = 2000; // milliseconds within which a kernel that runs no cell begins with a request

class Busy extends Error {}

// `send` sends a message to the kernel, and fails if that has ended; `answered` takes those that come from it.
function kernelActions(send) {
  const open = new Map();
  let last = 0;
  const mine = Math.random().toString(36).slice(2); // several views share the connection
  const answered = (message) => {
    const pending = open.get(message?.id);
    if (!pending) return;
    if (message.begun) {
      pending.begun = true;
      return;
    }
    open.delete(message.id);
    if (message.error) pending.reject(new Error(message.error));
    else pending.resolve(message.result);
  };
  // If it is `urgent`, a kernel that does not begin with it is `Busy`; it still does it later.
  const ask = (what, body, note, urgent = false) =>
    new Promise((resolve, reject) => {
      const id = `${mine}-${(last += 1)}`;
      open.set(id, { resolve, reject, begun: false });
      send({ id, do: what, body }).catch((error) => {
        open.delete(id);
        reject(urgent ? new Busy() : new Error(`The kernel has ended: ${error.message}`));
      });
      const busyNote = "The kernel is busy. It handles this request when the cell has ended.";
      const waits = () => open.has(id) && !open.get(id).begun;
      if (urgent) setTimeout(() => waits() && reject(new Busy()), IDLE);
      else setTimeout(() => waits() && note?.(busyNote), SLOW);
    });
  const actions = {
    scale: (body, note) => ask("scale", body, note),
    adapt: (body, note) => ask("adapt", body, note),
    stop: (note, urgent) => ask("stop", {}, note, urgent),
    detach: (note) => ask("detach", {}, note),
    log: (job, note) => ask("log", { job }, note),
  };
  return { actions, answered };
}

// The actions of the server extension, if it knows this very cluster.
async function findServer(snapshot) {
  const base = serverBase();
  if (!base) return null;
  try {
    const found = await request(clusterAddress(base, snapshot.name));
    return sameCluster(snapshot, found) ? { base, ...serverActions(base, snapshot.name) } : null;
  } catch {
    return null; // no extension, or not on this machine
  }
}

// Show a cluster in an element, until `end` is called. `move` shows the same view in another element.
function follow(model, place) {
  const { actions: kernel, answered } = kernelActions(async (message) => {
    const [base, inbox] = [serverBase(), model.get("inbox")];
    try {
      if (!base || !inbox) throw new Error("");
      await request(inboxAddress(base, inbox), message);
    } catch {
      model.send(message);
    }
  });
  let server = null;
  let searches = 0;
  let lastPicture = 0; // when the kernel sent its last picture to this view
  let fromKernel = false; // whether the kernel has sent anything to this view, so that it can do what the controls ask for
  let gone = false; // whether the kernel has ended
  let shown = null;
  let running = null;
  const lives = () => !over(shown);
  const doing = {
    ...Object.fromEntries(Object.keys(kernel).map((what) => [what, (...given) => (server?.[what] ?? kernel[what])(...given)])),
    // The program that has the cluster leaves it. After its end the server detaches the cluster.
    detach: (note) => (gone && server ? server.detach() : kernel.detach(note)),
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
  const thenQueryServer = (request) => async (...given) => {
    try {
      return await request(...given);
    } finally {
      queryServer();
    }
  };
  const actions = { ...doing, ...Object.fromEntries(["scale", "adapt", "stop", "detach"].map((what) => [what, thenQueryServer(doing[what])])) };
  const view = clusterView(place, { actions });

  const draw = (snapshot) => {
    shown = snapshot;
    const path = `${server?.base.replace(/\/*$/, "/")}hpcgpu/dashboard/${encodeURIComponent(snapshot.name)}/status`;
    const link = server && snapshot.dashboard && !snapshot.dashboard.startsWith("/");
    view.still(lives() && !server && !fromKernel);
    view.update(link ? { ...snapshot, dashboard: path } : snapshot);
  };
  const changed = () => {
    lastPicture = Date.now();
    fromKernel = true;
    draw(model.get("snapshot"));
    problem();
  };
  const problem = () => view.note(model.get("problem"));
  const changedProblem = () => {
    fromKernel = true;
    if (shown) draw(shown);
    problem();
  };

  const search = async () => {
    if (server || searches >= SEARCHES) return;
    searches += 1;
    server = await findServer(shown);
    if (server) draw(shown);
  };
  // Show what the server knows now, unless the kernel sends a picture meanwhile; where there is no server, tell the age.
  const queryOnce = async () => {
    const before = lastPicture;
    await search();
    try {
      if (!server) throw new Error("");
      const newest = await request(clusterAddress(server.base, shown.name));
      if (lastPicture !== before) return;
      if (!sameCluster(shown, newest)) {
        server = null;
        throw new Error("A later cluster has its name.");
      }
      draw(newest);
      view.note("");
    } catch (error) {
      if (lastPicture !== before || !lives() || (!gone && Date.now() - (lastPicture || 1000 * shown.time) < OLD)) return;
      view.still(!server && !fromKernel);
      const time = new Date(shown.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
      view.note(`This view was last updated at ${time}. ${error.message || (!gone && model.get("problem")) || "The kernel sends no updates."}`);
    }
  };
  // One request at a time; what changed during one is asked for again.
  const queryServer = async () => {
    if (!shown) return;
    await running;
    running ??= queryOnce().finally(() => (running = null));
    await running;
  };
  const watch = () => {
    if (!shown || document.visibilityState !== "visible") return;
    if (lives() && Date.now() - lastPicture > SILENT) queryServer();
    else search();
  };
  const lost = () => {
    gone = true;
    fromKernel = false;
    lastPicture = 0;
    if (shown) draw(shown);
    queryServer();
  };

  const listeners = { "change:snapshot": changed, "change:problem": changedProblem, comm_live_update: lost, "msg:custom": answered };
  const listen = (on) => Object.entries(listeners).forEach(([name, listener]) => model[on ? "on" : "off"](name, listener));
  const sendToKernel = (what) => {
    try {
      model.send({ do: what });
    } catch {
      // the kernel is gone
    }
  };
  listen(true);
  const timer = setInterval(watch, POLL);
  const seenTimer = setInterval(() => document.visibilityState === "visible" && sendToKernel("seen"), SEEN);
  let focused = null;
  let lostFocus = 0; // when nothing else took it: perhaps the element was taken off the page
  view.element.addEventListener("focusin", (event) => ([focused, lostFocus] = [event.target, 0]));
  view.element.addEventListener("focusout", (event) => ([focused, lostFocus] = event.relatedTarget ? [null, 0] : [focused, Date.now()]));
  sendToKernel("shown");
  if (model.get("snapshot")?.name) draw(model.get("snapshot")); // it may come from the file of a notebook
  problem();
  queryServer();
  return {
    // Whether it was taken off the page. What JupyterLab has scrolled away is still in its cell.
    removed: () => place === null || (!place.isConnected && !place.closest(".jp-Cell")),
    move(toModel, toPlace) {
      listen(false);
      [model, place] = [toModel, toPlace];
      listen(true);
      place.append(view.element);
      const before = lostFocus && Date.now() - lostFocus > REDRAWN ? null : focused;
      const attached = new MutationObserver(() => {
        if (!place?.isConnected) return;
        attached.disconnect();
        if (!document.activeElement?.matches("input, select, textarea, [contenteditable]")) before.focus();
      });
      if (before) attached.observe(document.body, { childList: true, subtree: true });
    },
    // Leave an element. It has `ended` if no other one comes.
    leave(from, ended) {
      if (place !== from) return;
      place = null;
      setTimeout(() => place === null && ended(), REDRAWN);
    },
    end() {
      clearInterval(timer);
      clearInterval(seenTimer);
      listen(false);
      sendToKernel("hidden");
      view.destroy();
    },
  };
}

const views = new WeakMap(); // of each widget, by its layout, which is its own

// Where JupyterLab has not our extension, and in other frontends, a new picture in the file draws the whole output anew.
// The view goes on in the new element: what is typed, opened and under way stays.
function render({ model, el }) {
  const all = views.get(model.get("layout")) ?? new Set();
  views.set(model.get("layout"), all);
  const moved = [...all].find((view) => view.removed());
  const view = moved ?? follow(model, el);
  if (moved) moved.move(model, el);
  else all.add(view);
  return () =>
    view.leave(el, () => {
      all.delete(view);
      view.end();
    });
}

export default { render };
