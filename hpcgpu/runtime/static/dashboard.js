// The page around a page of Dask. What Dask sends must not run with the powers of the user's login: it may contain text
// of anybody. So it runs in a frame of no origin, which gets no cookies and reaches no address. This page, which shows
// none of that text itself, fetches for the frame what belongs to the page, and connects its websockets: both below the
// address of this dashboard and nowhere else.

const base = new URL(document.body.dataset.base, location.href).href;
const below = (address) => new URL(address, location.href).href.startsWith(base);
const sockets = new Set();

// A script of the frame may ask for a new page as often as it likes.
addEventListener("message", (event) => {
  if (event.source !== frame.contentWindow || event.data !== "ready") return;
  for (const socket of sockets) socket.close();
  const channel = new MessageChannel();
  channel.port1.onmessage = asked;
  frame.contentWindow.postMessage({ base, page }, "*", [channel.port2]);
});

const page = await fetched();
const frame = document.createElement("iframe");
frame.sandbox = "allow-scripts allow-popups allow-popups-to-escape-sandbox allow-downloads";
frame.src = new URL("?~frame", location.href);
frame.style.cssText = "position: fixed; inset: 0; width: 100%; height: 100%; border: 0; background: white";
document.body.append(frame);

function asked({ data, ports }) {
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
  return (parsed.doctype ? "<!DOCTYPE html>" : "") + parsed.documentElement.outerHTML;
}

function text(words) {
  const parsed = document.implementation.createHTMLDocument();
  const shown = parsed.createElement("pre");
  shown.textContent = words;
  shown.style.whiteSpace = "pre-wrap";
  parsed.body.append(shown);
  return parsed.documentElement.outerHTML;
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
  socket.onopen = () => port.postMessage({ open: socket.protocol });
  socket.onmessage = ({ data }) => port.postMessage({ message: data });
  socket.onclose = ({ code, reason }) => {
    sockets.delete(socket);
    port.postMessage({ close: [code, reason] });
  };
  port.onmessage = ({ data }) => {
    if (data === "close") socket.close();
    else socket.send(data.send);
  };
}
