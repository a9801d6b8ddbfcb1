// Keeps a page up to date: when the manager says that something has changed, the page is fetched
// again, and the parts that are marked as live take the place of those that differ. What somebody
// is typing into, or has focused, is left alone. Other modules hear of it by the event "renewed".

const zone = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });

export function times(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    time.textContent = zone.format(new Date(1000 * Number(time.getAttribute("datetime"))));
  }
}

let busy = false;
let again = false;
// A page without parts that change is left as it is: what it shows may have cost something.
const live = document.querySelector("[data-live], .chart[data-chart], #view");

async function renew() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (answer.redirected) location.reload();
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    times(fresh);
    for (const part of document.querySelectorAll("[data-live]")) {
      const other = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
      if (!other || other.innerHTML === part.innerHTML) continue;
      if (part !== document.activeElement && part.contains(document.activeElement)) continue;
      const atEnd = part.scrollHeight - part.scrollTop - part.clientHeight < 40;
      part.innerHTML = other.innerHTML;
      if (part.matches(".log") && atEnd) part.scrollTop = part.scrollHeight;
    }
    document.dispatchEvent(new CustomEvent("renewed", { detail: fresh }));
  } finally {
    busy = false;
  }
  if (again) {
    again = false;
    setTimeout(() => renew().catch(() => broker("lost")), 1000);
  }
}

function broker(state) {
  const shown = document.querySelector("#broker");
  if (!shown) return;
  shown.textContent = state === "lost" ? "manager not reached" : `broker ${state}`;
  shown.className = `state ${state === "up" ? "good" : "bad"}`;
}

// Parts that cost something are fetched when they are asked for.
document.addEventListener("click", async (event) => {
  const part = event.target.closest("[data-load] > button")?.parentElement;
  if (!part) return;
  part.textContent = "Reading.";
  try {
    const answer = await fetch(part.dataset.load);
    if (!answer.ok) throw new Error(await answer.text());
    part.innerHTML = await answer.text();
    times(part);
  } catch (error) {
    part.textContent = "This can't be had at this moment; load the page again.";
  }
});

times(document);
for (const log of document.querySelectorAll(".log")) log.scrollTop = log.scrollHeight;
const main = document.querySelector("main[data-version]");
if (main) {
  const source = new EventSource(`/events?since=${main.dataset.version}`);
  let [known, missed] = [Number(main.dataset.version), false];
  const look = () => {
    missed = document.visibilityState !== "visible";
    if (!missed && live) renew().catch(() => broker("lost"));
  };
  source.onmessage = (message) => {
    const told = JSON.parse(message.data);
    broker(told.broker);
    if (told.version === known) return;
    known = told.version;
    look();
  };
  source.onerror = () => broker("lost");
  document.addEventListener("visibilitychange", () => {
    if (missed) look();
  });
}
