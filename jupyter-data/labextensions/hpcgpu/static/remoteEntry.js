// A card in JupyterLab's launcher, and a command, that open the page hpcgpu/ in a tab of the browser.
//
// JupyterLab loads a prebuilt extension as a container of webpack's module federation: an object with `init`, which is
// given the modules that JupyterLab shares, and `get`. Written by hand it needs no bundler.
(() => {
  const COMMAND = "hpcgpu:open";
  const ICON = `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect x="3" y="6" width="26" height="20" rx="3"
fill="#2f8f4e"/><g fill="#fff"><rect x="7" y="10" width="8" height="5" rx="1"/><rect x="17" y="10" width="8" height="5"
rx="1"/><rect x="7" y="17" width="8" height="5" rx="1"/><rect x="17" y="17" width="8" height="5" rx="1"/></g></svg>`;
  let shared = {};

  async function load(name) {
    const [version] = Object.values(shared[name]);
    return (await version.get())();
  }

  async function extension() {
    const { ILauncher } = await load("@jupyterlab/launcher");
    const { ICommandPalette } = await load("@jupyterlab/apputils");
    const { LabIcon } = await load("@jupyterlab/ui-components");
    const activate = (app, launcher, palette) => {
      app.commands.addCommand(COMMAND, {
        label: "GPU clusters",
        caption: "Show, start and stop the clusters of hpcgpu",
        icon: new LabIcon({ name: "hpcgpu:icon", svgstr: ICON }),
        execute: () => {
          window.open(`${app.serviceManager.serverSettings.baseUrl}hpcgpu/`, "_blank", "noopener");
        },
      });
      launcher?.add({ command: COMMAND, category: "Other", rank: 50 });
      palette?.addItem({ command: COMMAND, category: "HPC" });
    };
    return { __esModule: true, default: { id: "hpcgpu:launcher", autoStart: true, optional: [ILauncher, ICommandPalette], activate } };
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
