// In JupyterLab: a card in the launcher, and a command, that open the page hpcgpu/ in a tab of it; and what a notebook
// shows of a cluster whose widget is gone.
//
// JupyterLab loads a prebuilt extension as a container of webpack's module federation: an object with `init`, which is
// given the modules that JupyterLab shares, and `get`. Written by hand it needs no bundler.
(() => {
  const COMMAND = "hpcgpu:open";
  const LABEL = "GPU clusters";
  const ICON = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect x="3" y="6" width="26" height="20" rx="3"
fill="#2f8f4e"/><g fill="#fff"><rect x="7" y="10" width="8" height="5" rx="1"/><rect x="17" y="10" width="8" height="5"
rx="1"/><rect x="7" y="17" width="8" height="5" rx="1"/><rect x="17" y="17" width="8" height="5" rx="1"/></g></svg>`;
  // What hpcgpu/cluster/notebook.py writes beside the widget: the name of the cluster, its directory and its jobs.
  const CLUSTER = "application/vnd.hpcgpu.cluster+json";
  const WIDGET = "application/vnd.jupyter.widget-view+json";
  let shared = {};

  async function load(name) {
    const [version] = Object.values(shared[name]);
    return (await version.get())();
  }

  // Let a renderer of widgets show the picture in the file, or the live cluster, as long as it has no widget. It stays the
  // widget manager's own, which finds it by its class.
  function withPicture(renderer, rendermime, base) {
    const node = renderer.node;
    const place = document.createElement("div");
    const picture = document.createElement("div");
    place.append(picture);
    const theirs = renderer.renderModel.bind(renderer);
    let about = null;
    let end = null;
    let focused = null; // what loses the focus because JupyterLab empties the node
    place.addEventListener("focusin", (event) => (focused = event.target));
    place.addEventListener("focusout", (event) => event.relatedTarget && (focused = null));
    const follow = async () => {
      const of = about;
      await new Promise((resolve) => setTimeout(resolve, 500)); // a widget that is there comes sooner
      if (hasWidget() || end !== null || of !== about) return;
      const { showStored } = await import(`${base}hpcgpu/static/stored.js`);
      if (!hasWidget() && end === null && of === about && !renderer.isDisposed) end = showStored(place, picture, about, base);
    };
    const unfollow = () => {
      end?.();
      end = null;
    };
    const hasWidget = () => [...node.children].some((child) => child !== place);
    const settle = () => {
      if (hasWidget()) {
        place.remove();
        unfollow();
      } else if (node.childNodes.length !== 1 || node.firstChild !== place) {
        node.classList.remove("jupyter-widgets");
        node.replaceChildren(place);
        if (document.activeElement === document.body) focused?.focus();
        if (end === null) follow().catch(() => {}); // the server has no extension: the picture stays
      }
    };
    new MutationObserver(settle).observe(node, { childList: true });
    renderer.disposed.connect(unfollow);
    renderer.hide = settle; // the widget manager hides it when the widget is closed
    renderer.renderModel = async (model) => {
      const still = rendermime.createRenderer("text/html");
      const data = { "text/html": model.data["text/html"] ?? "" };
      await still.renderModel(rendermime.createModel({ data, trusted: false }));
      picture.replaceChildren(still.node);
      const same = about !== null && about.model_id === model.data[CLUSTER].model_id;
      about = model.data[CLUSTER];
      if (same && hasWidget()) return; // what the user has typed stays: only the picture in the file is new
      // The widget manager calls this again when the kernel is there. If the kernel has no such widget, the live view stays.
      if (!same) unfollow();
      await theirs(model);
      settle();
    };
    return renderer;
  }

  function showClusters(rendermime, base) {
    const createRenderer = () =>
      withPicture(rendermime.createRenderer(rendermime.getFactory(WIDGET) ? WIDGET : "text/html"), rendermime, base);
    rendermime.addFactory({ safe: false, mimeTypes: [CLUSTER], createRenderer }, -20); // before that of widgets
  }

  async function extension() {
    const { ILauncher } = await load("@jupyterlab/launcher");
    const { ILayoutRestorer } = await load("@jupyterlab/application");
    const { ICommandPalette, MainAreaWidget, WidgetTracker } = await load("@jupyterlab/apputils");
    const { LabIcon } = await load("@jupyterlab/ui-components");
    const { Widget } = await load("@lumino/widgets");
    const icon = new LabIcon({ name: "hpcgpu:icon", svgstr: ICON });
    const tab = (address) => {
      const page = Object.assign(document.createElement("iframe"), { src: address, title: LABEL });
      page.style.border = "0";
      const widget = new MainAreaWidget({ content: new Widget({ node: page }) });
      Object.assign(widget, { id: "hpcgpu-clusters" });
      Object.assign(widget.title, { label: LABEL, icon, closable: true });
      return widget;
    };
    const activate = (app, launcher, palette, restorer) => {
      const tracker = new WidgetTracker({ namespace: "hpcgpu" });
      app.commands.addCommand(COMMAND, {
        label: LABEL,
        caption: "Show, start and stop the clusters of hpcgpu",
        icon,
        execute: async () => {
          const widget = tracker.currentWidget ?? tab(`${app.serviceManager.serverSettings.baseUrl}hpcgpu/`);
          if (!tracker.has(widget)) await tracker.add(widget);
          if (!widget.isAttached) app.shell.add(widget, "main");
          app.shell.activateById(widget.id);
        },
      });
      launcher?.add({ command: COMMAND, category: "Other", rank: 50 });
      palette?.addItem({ command: COMMAND, category: "HPC" });
      restorer?.restore(tracker, { command: COMMAND, name: () => "clusters" });
      const base = app.serviceManager.serverSettings.baseUrl;
      app.docRegistry.addWidgetExtension("Notebook", {
        createNew: (panel) => showClusters(panel.content.rendermime, base),
      });
    };
    const optional = [ILauncher, ICommandPalette, ILayoutRestorer];
    return { __esModule: true, default: { id: "hpcgpu:launcher", autoStart: true, optional, activate } };
  }

  window._JUPYTERLAB = window._JUPYTERLAB || {};
  window._JUPYTERLAB.hpcgpu = {
    init: (scope) => {
      shared = scope;
    },
    get: async () => {
      const module = await extension();
      return () => module;
    },
  };
})();
