// Shows environments: a map as a map, a graph as a graph, and events as they come.

const SVG = "http://www.w3.org/2000/svg";
const MOST_EVENTS = 200;
const LABELS = 60;

function node(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

function picture(width, height, label) {
  return node("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label });
}

function drawMap(view) {
  const scale = Math.min(800 / view.width, 520 / view.height);
  const [width, height] = [view.width * scale + 20, view.height * scale + 20];
  const svg = picture(width, height, "Map");
  const at = (x, y) => [10 + x * scale, 10 + (view.height - y) * scale];
  for (const [name, [x0, y0, x1, y1]] of Object.entries(view.zones)) {
    const [left, top] = at(x0, y1);
    svg.append(node("rect", { x: left, y: top, width: (x1 - x0) * scale, height: (y1 - y0) * scale, fill: "#4c8fd622", stroke: "#4c8fd6" }));
    svg.append(node("text", { x: left + 4, y: top + 14 }, name));
  }
  const places = Object.entries(view.places);
  for (const [name, [x, y]] of places) {
    const [cx, cy] = at(x, y);
    const dot = node("circle", { cx, cy, r: places.length > 300 ? 2.5 : 5, fill: "#d9822b" });
    dot.append(node("title", {}, `${name}: ${x}, ${y}`));
    svg.append(dot);
    if (places.length > LABELS) continue;
    const right = cx > 0.8 * width;
    svg.append(node("text", { x: cx + (right ? -7 : 7), y: cy + 4, "text-anchor": right ? "end" : "start" }, name));
  }
  return svg;
}

// Springs along links, and all push each other away (after Fruchterman and Reingold, 1991); from
// equal places on, so that the same graph looks the same each time.
function settle(count, edges) {
  const golden = Math.PI * (3 - Math.sqrt(5));
  const place = Array.from({ length: count }, (_, i) => {
    const r = Math.sqrt((i + 0.5) / count);
    return [r * Math.cos(i * golden), r * Math.sin(i * golden)];
  });
  const ideal = 1 / Math.sqrt(Math.max(count, 1));
  for (let step = 0, heat = 0.1; step < 150; step++, heat *= 0.97) {
    const push = place.map(() => [0, 0]);
    for (let i = 0; i < count; i++) {
      for (let j = i + 1; j < count; j++) {
        const [dx, dy] = [place[i][0] - place[j][0], place[i][1] - place[j][1]];
        const square = dx * dx + dy * dy + 1e-6;
        const f = (ideal * ideal) / square;
        push[i][0] += dx * f; push[i][1] += dy * f;
        push[j][0] -= dx * f; push[j][1] -= dy * f;
      }
    }
    for (const [a, b] of edges) {
      const [dx, dy] = [place[a][0] - place[b][0], place[a][1] - place[b][1]];
      const f = (Math.hypot(dx, dy) / ideal) * 0.5;
      push[a][0] -= dx * f; push[a][1] -= dy * f;
      push[b][0] += dx * f; push[b][1] += dy * f;
    }
    for (let i = 0; i < count; i++) {
      const length = Math.hypot(...push[i]) + 1e-9;
      const go = Math.min(length, heat) / length;
      place[i][0] += push[i][0] * go;
      place[i][1] += push[i][1] * go;
    }
  }
  return place;
}

function drawGraph(view) {
  const [width, height] = [800, 520];
  const svg = picture(width, height, "Graph");
  const number = new Map(view.nodes.map(([name], i) => [name, i]));
  const edges = view.edges.map(([a, b]) => [number.get(a), number.get(b)]).filter(([a, b]) => a !== undefined && b !== undefined);
  const place = settle(view.nodes.length, edges);
  const [xs, ys] = [0, 1].map((k) => place.map((p) => p[k]));
  const fit = (v, all, size) => 30 + ((v - Math.min(...all)) / (Math.max(...all) - Math.min(...all) || 1)) * (size - 60);
  const at = place.map(([x, y]) => [fit(x, xs, width), fit(y, ys, height)]);
  for (const [a, b] of edges) {
    svg.append(node("line", { x1: at[a][0], y1: at[a][1], x2: at[b][0], y2: at[b][1], stroke: "#8886" }));
  }
  const most = Math.max(1, ...view.nodes.map(([, size]) => size));
  view.nodes.forEach(([name, size], i) => {
    const dot = node("circle", { cx: at[i][0], cy: at[i][1], r: 3 + 9 * Math.sqrt(size / most), fill: "#4c8fd6" });
    dot.append(node("title", {}, `${name}: ${size}`));
    svg.append(dot);
    if (view.nodes.length <= LABELS) svg.append(node("text", { x: at[i][0] + 9, y: at[i][1] + 4 }, name));
  });
  return svg;
}

let shown = "";
function show(text) {
  if (text === shown) return;
  shown = text;
  const view = JSON.parse(text);
  const box = document.querySelector("#view");
  const drawn = view.kind === "map" ? drawMap(view) : view.kind === "graph" ? drawGraph(view) : null;
  box.replaceChildren(...(drawn ? [drawn] : []));
}

const box = document.querySelector("#view");
if (box) {
  show(box.dataset.view);
  document.addEventListener("renewed", ({ detail: fresh }) => {
    const other = fresh.querySelector("#view");
    if (other) show(other.dataset.view);
  });
}

const list = document.querySelector("[data-events]");
const said = document.querySelector("#listening");
let source = null;

function add(told) {
  const item = document.createElement("li");
  const [name, note, rest] = [document.createElement("strong"), document.createElement("small"), document.createElement("code")];
  name.textContent = told.name;
  note.textContent = ` round ${told.round}${told.by ? `, by ${told.by}` : ""} `;
  note.className = "note";
  rest.textContent = told.arguments;
  item.append(name, note, rest);
  if (told.left_out) item.append(` (${told.left_out} before it are not shown)`);
  list.prepend(item);
  while (list.children.length > MOST_EVENTS) list.lastChild.remove();
}

function listen() {
  if (source || !list.dataset.events || document.visibilityState !== "visible") return;
  source = new EventSource(list.dataset.events);
  source.onopen = () => { said.textContent = "Listening; events appear as they come."; };
  source.onerror = () => { said.textContent = "Not connected; trying again."; };
  source.onmessage = (message) => add(JSON.parse(message.data));
}

function stop(why) {
  source?.close();
  source = null;
  if (why) said.textContent = why;
}

if (list?.dataset.events) {
  listen();
  document.addEventListener("visibilitychange", () => (document.visibilityState === "visible" ? listen() : stop("")));
  document.addEventListener("renewed", ({ detail: fresh }) => {
    if (fresh.querySelector("#events") && !fresh.querySelector("[data-events]")) {
      delete list.dataset.events;
      stop("The run is not under way any more.");
    }
  });
}
