// Keeps a page up to date: when the manager says that something has changed, the page is fetched
// again, and the parts that are marked as live take the place of those that differ. What somebody
// is typing into is left alone.

const zone = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });

function times(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    time.textContent = zone.format(new Date(1000 * Number(time.getAttribute("datetime"))));
  }
}

function draw(canvas) {
  const { rounds, lines } = JSON.parse(canvas.dataset.chart);
  const names = Object.keys(lines);
  canvas.hidden = rounds.length < 2 || names.length === 0;
  if (canvas.hidden) return;
  const style = getComputedStyle(document.body);
  const pen = canvas.getContext("2d");
  const [width, height, left, right, top, bottom] = [canvas.width, canvas.height, 50, 150, 10, 24];
  const points = names.flatMap((n) => lines[n]).filter((v) => typeof v === "number");
  let [low, high] = [Math.min(...points), Math.max(...points)];
  if (low === high) [low, high] = [low - 1, high + 1];
  const x = (i) => left + (i / (rounds.length - 1)) * (width - left - right);
  const y = (v) => top + (1 - (v - low) / (high - low)) * (height - top - bottom);
  pen.clearRect(0, 0, width, height);
  pen.font = "12px system-ui, sans-serif";
  pen.fillStyle = style.color;
  for (const v of [low, (low + high) / 2, high]) pen.fillText(v.toPrecision(3), 4, y(v) + 4);
  pen.fillText(`round ${rounds[0]}`, left, height - 6);
  pen.fillText(String(rounds.at(-1)), x(rounds.length - 1) - 10, height - 6);
  names.forEach((name, k) => {
    pen.strokeStyle = pen.fillStyle = `hsl(${(210 + 67 * k) % 360} 60% 50%)`;
    pen.lineWidth = 2;
    pen.beginPath();
    lines[name].forEach((v, i) => {
      if (typeof v === "number") pen.lineTo(x(i), y(v));
    });
    pen.stroke();
    pen.fillText(name, width - right + 12, top + 14 + 16 * k);
  });
}

function show(root) {
  times(root);
  for (const canvas of root.querySelectorAll("canvas[data-chart]")) draw(canvas);
}

async function renew() {
  const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
  if (answer.redirected) location.reload();
  if (!answer.ok) return;
  const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
  show(fresh);
  for (const part of document.querySelectorAll("[data-live]")) {
    const other = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
    if (!other || other.innerHTML === part.innerHTML || part.contains(document.activeElement)) continue;
    part.innerHTML = other.innerHTML;
  }
  const [chart, other] = [document, fresh].map((d) => d.querySelector("canvas[data-chart]"));
  if (chart && other && chart.dataset.chart !== other.dataset.chart) {
    chart.dataset.chart = other.dataset.chart;
    draw(chart);
  }
}

function broker(state) {
  const shown = document.querySelector("#broker");
  if (!shown) return;
  shown.textContent = state === "lost" ? "manager not reached" : `broker ${state}`;
  shown.className = `state ${state === "up" ? "good" : "bad"}`;
}

show(document);
const main = document.querySelector("main[data-version]");
if (main) {
  const source = new EventSource(`/events?since=${main.dataset.version}`);
  source.onmessage = (message) => {
    broker(JSON.parse(message.data).broker);
    renew().catch(() => broker("lost"));
  };
  source.onerror = () => broker("lost");
}
