// The page around a page of Dask. What Dask sends must not run with the powers of the user's login: it may contain text
// of anybody. So it runs in a frame of no origin, which gets no cookies and reaches no address. This page, which shows
// none of that text itself, fetches for the frame what belongs to the page, and connects its websockets: both below the
// address of this dashboard and nowhere else.

const base = new URL(document.body.dataset.base, location.href).href;
const below = (address) => new URL(address, location.href).href.startsWith(base);
const sockets = new Set();
const AGAIN = 3000; // milliseconds between two attempts to connect again
const BRIEF = 10000; // a connection that is lost earlier than this waits longer
const bar = Object.assign(document.createElement("p"), { role: "alert" });
let leaving = false;
addEventListener("pagehide", () => (leaving = true));
addEventListener("pageshow", () => (leaving = false));

// A script of the frame may ask for a new page as often as it likes.
addEventListener("message", (event) => {
  if (event.source !== frame.contentWindow || typeof event.data?.nonce !== "string") return;
  for (const socket of sockets) {
    socket.onclose = null;
    socket.close();
  }
  sockets.clear();
  const channel = new MessageChannel();
  channel.port1.onmessage = handleRequest;
  // the scripts that Dask sends run there, and no others
  for (const script of page.scripts) script.setAttribute("nonce", event.data.nonce);
  const content = (page.doctype ? "<!DOCTYPE html>" : "") + page.documentElement.outerHTML;
  frame.contentWindow.postMessage({ base, content }, "*", [channel.port2]);
});

const page = await fetched();
const frame = document.createElement("iframe");
frame.sandbox = "allow-scripts allow-popups allow-popups-to-escape-sandbox allow-downloads";
frame.src = new URL("?~frame", location.href);
frame.style.cssText = "position: fixed; inset: 0; width: 100%; height: 100%; border: 0; background: white";
document.body.append(frame);

function handleRequest({ data, ports }) {
  if (data.socket) connect(data.socket, data.protocols, ports[0]);
  else if (data.go && below(data.go)) location.assign(data.go);
  else if (data.open && below(data.open)) open(data.open, "_blank", "noopener");
}

async function fetched() {
  let answer;
  try {
    answer = await fetch(location.href, { cache: "no-store" });
  } catch {
    return text("The server of this page does not answer. If it runs, reload this page.");
  }
  if (!below(answer.url)) {
    location.reload(); // to the login
    return new Promise(() => {});
  }
  const kind = answer.headers.get("Content-Type") ?? "";
  if (!kind.startsWith("text/html")) return text(await answer.text());
  if (answer.redirected) history.replaceState(null, "", answer.url);
  // a document that is only parsed: no script of it runs, and it loads nothing; of its inline styles and handlers, the
  // browser's console says that this page's policy refuses them
  const parsed = new DOMParser().parseFromString(await answer.text(), "text/html");
  const parts = parsed.querySelectorAll("script[src], img[src], link[rel=stylesheet][href]");
  await Promise.all([...parts].map((part) => include(part, answer.url)));
  document.title = parsed.title;
  return parsed;
}

function text(words) {
  const parsed = document.implementation.createHTMLDocument();
  const shown = parsed.createElement("pre");
  shown.textContent = words;
  shown.style.whiteSpace = "pre-wrap";
  parsed.body.append(shown);
  return parsed;
}

async function include(part, from) {
  const name = part.hasAttribute("src") ? "src" : "href";
  const address = new URL(part.getAttribute(name), from).href;
  if (!below(address)) return;
  const answer = await fetch(address, { redirect: "error" }).catch(() => null);
  if (!answer?.ok) return;
  const reader = new FileReader();
  reader.readAsDataURL(await answer.blob());
  await new Promise((done) => (reader.onloadend = done));
  part.setAttribute(name, reader.result);
}

function connect(address, protocols, port) {
  const url = new URL(address);
  url.protocol = location.protocol;
  url.search = location.search;
  if (!below(url)) return port.postMessage({ close: [1008, "not of this dashboard"] });
  url.protocol = location.protocol.replace("http", "ws");
  const socket = new WebSocket(url, protocols);
  sockets.add(socket);
  socket.binaryType = "arraybuffer";
  let opened = 0;
  let wanted = true;
  socket.onopen = () => {
    opened = Date.now();
    port.postMessage({ open: socket.protocol });
  };
  socket.onmessage = ({ data }) => port.postMessage({ message: data });
  socket.onclose = ({ code, reason }) => {
    sockets.delete(socket);
    port.postMessage({ close: [code, reason] });
    if (wanted) setTimeout(() => leaving || lost(opened), 500);
  };
  port.onmessage = ({ data }) => {
    if (data !== "close") return socket.send(data.send);
    wanted = false;
    socket.close();
  };
}

function showMessage(words) {
  bar.textContent = words;
  bar.style.cssText = "position: fixed; z-index: 1; inset: auto 0 0; margin: 0; padding: 8px 12px; background: #6b4a00; color: white; font: 14px sans-serif; white-space: pre-wrap";
  if (!bar.isConnected) document.body.append(bar);
}

// A page of Dask does not connect again by itself, and goes on showing what it has.
async function lost(opened) {
  if (bar.isConnected) return;
  if (!opened) {
    return showMessage("This page shows no changes, because its websocket cannot be opened. Perhaps a proxy of the site does not pass websockets on. Reload the page to try again.");
  }
  const words = `The connection was lost at ${new Date().toLocaleTimeString()}: this page shows what was so then. It is loaded again when the server answers.`;
  showMessage(words);
  let wait = Date.now() - opened < BRIEF ? 10 * AGAIN : AGAIN;
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, wait));
    wait = AGAIN;
    if (document.hidden) continue;
    const answer = await fetch(location.href, { cache: "no-store" }).catch(() => null);
    if (answer?.ok || (answer && !below(answer.url))) return location.reload(); // the second: to the login
    const plain = answer?.headers.get("Content-Type")?.startsWith("text/plain");
    showMessage(plain ? `${words}\n${await answer.text()}` : words);
  }
}
