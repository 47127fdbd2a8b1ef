// Shows a cluster of a notebook's file live, where its widget is gone: the kernel has ended, or it is busy since before the
// page was opened. jupyter-data/labextensions/hpcgpu/static/remoteEntry.js uses it in JupyterLab.

import { clusterAddress, clusterView, over, request, sameCluster, serverActions } from "./panel.js";

const POLL = 3000; // milliseconds
const SEARCHES = 10;

// Put a live view into `place` and hide `picture`, if the server knows the cluster that the file names: its name, directory
// and the ids of its jobs. Returns what ends that.
export function showStored(place, picture, before, base) {
  let view = null;
  let shown = null;
  let searches = 0;
  const style = document.createElement("link");
  Object.assign(style, { rel: "stylesheet", href: `${base}hpcgpu/static/widget.css` });

  const poll = async () => {
    if (!view && (searches += 1) > SEARCHES) return;
    try {
      const newest = await request(clusterAddress(base, before.name));
      if (!sameCluster(shown ?? before, newest)) throw new Error("A later cluster has its name.");
      if (!view) {
        place.append(style);
        view = clusterView(place, { actions });
        picture.hidden = true;
      }
      shown = newest;
      view.still(false);
      view.update(newest);
      view.note("");
    } catch (error) {
      if (!view || (shown && over(shown))) return;
      const time = new Date(shown.time * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });
      view.still(true);
      view.note(`This view was last updated at ${time}. ${error.message}`);
    }
  };
  const plain = serverActions(base, before.name);
  const thenPoll = (what) => (body) => plain[what](body).finally(poll);
  const actions = { ...plain, ...Object.fromEntries(["scale", "adapt", "detach", "stop"].map((what) => [what, thenPoll(what)])) };
  const timer = setInterval(() => place.isConnected && document.visibilityState === "visible" && !(shown && over(shown)) && poll(), POLL);
  poll();
  return () => {
    clearInterval(timer);
    view?.destroy();
    style.remove();
    picture.hidden = false;
  };
}
