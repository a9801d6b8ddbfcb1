// Draws charts with Plotly, and moves them when the page is renewed.

const COLOURS = ["#4c8fd6", "#d9822b", "#3fa66b", "#c6524f", "#8b6fc9", "#a0795a", "#cf6fb0", "#7c8894", "#9aa52c", "#2fa9b5", "#b58900", "#6c71c4"];
const dark = matchMedia("(prefers-color-scheme: dark)");

let library;
function plotly() {
  library ??= new Promise((resolve, reject) => {
    const script = document.createElement("script");
    script.src = "/static/plotly.js";
    script.onload = () => resolve(window.Plotly);
    script.onerror = () => reject(new Error("no charts"));
    document.head.append(script);
  });
  return library;
}

function layout(more) {
  const ink = dark.matches ? "#ddd" : "#333";
  const line = dark.matches ? "#444" : "#ddd";
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, fixedrange: true };
  const { xaxis, yaxis, ...rest } = more;
  return {
    paper_bgcolor: "transparent",
    plot_bgcolor: "transparent",
    font: { color: ink, family: "system-ui, sans-serif", size: 12 },
    margin: { l: 50, r: 10, t: 30, b: 40 },
    height: 300,
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 },
    hovermode: "x unified",
    xaxis: { ...axis, ...xaxis },
    yaxis: { ...axis, ...yaxis },
    ...rest,
  };
}

// What was written by people or models is text: Plotly reads a few tags in names and labels.
const plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function lines({ rounds, lines: held, main }) {
  const traces = Object.entries(held).map(([name, values], k) => ({
    type: "scatter",
    mode: rounds.length > 60 ? "lines" : "lines+markers",
    name: plain(name),
    // The others are a click on the legend away.
    visible: !main?.length || main.includes(name) ? true : "legendonly",
    x: rounds,
    y: values,
    line: { color: COLOURS[k % COLOURS.length], width: 2 },
    connectgaps: false,
  }));
  const whole = rounds.length <= 20 ? { dtick: 1 } : {};
  return [traces, layout({ xaxis: { title: { text: "round" }, ...whole }, showlegend: traces.length > 1 })];
}

function bars({ labels, shares, asked }) {
  const x = labels.map((label) => plain(label.length > 24 ? `${label.slice(0, 23)}…` : label));
  const traces = [{ type: "bar", name: "obtained", x, y: shares, marker: { color: COLOURS[0] } }];
  if (asked?.some((share) => share !== null)) {
    traces.push({ type: "scatter", mode: "markers", name: "asked", x, y: asked, marker: { color: COLOURS[1], symbol: "line-ew-open", size: 14, line: { width: 3 } } });
  }
  return [traces, layout({ xaxis: { type: "category", tickangle: -40 }, yaxis: { tickformat: ".0%" }, showlegend: traces.length > 1, height: 320 })];
}

async function draw(box) {
  const data = JSON.parse(box.dataset.chart);
  const empty = box.dataset.kind === "bars" ? data.labels.length === 0 : data.rounds.length === 0 || Object.keys(data.lines).length === 0;
  box.hidden = empty;
  if (empty) return;
  const [traces, shape] = box.dataset.kind === "bars" ? bars(data) : lines(data);
  const Plotly = await plotly();
  await Plotly.react(box, traces, shape, { displayModeBar: false, responsive: true });
  box.dataset.drawn = String(Number(box.dataset.drawn ?? 0) + 1);
}

function all() {
  for (const box of document.querySelectorAll(".chart[data-chart]")) {
    draw(box).catch(() => {
      box.textContent = "The chart can't be drawn here; the table below holds the same.";
    });
  }
}

all();
dark.addEventListener("change", all);
document.addEventListener("renewed", ({ detail: fresh }) => {
  for (const box of document.querySelectorAll(".chart[data-chart]")) {
    const other = fresh.getElementById(box.id);
    if (!other || other.dataset.chart === box.dataset.chart) continue;
    box.dataset.chart = other.dataset.chart;
    draw(box).catch(() => {});
  }
});
