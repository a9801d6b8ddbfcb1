// Keeps a page up to date: when the manager says that something has changed, the page is fetched
// again, and the parts that are marked as live take the place of those that differ. What somebody
// is typing into is left alone; what is focused, opened or scrolled stays so. Other modules hear of
// it by the event "renewed".

const zone = new Intl.DateTimeFormat(undefined, { dateStyle: "short", timeStyle: "medium" });
const SCROLLED = ".facts dd, .chat, .events, pre, .scroll";
const main = document.querySelector("main[data-version]");
// A page without parts that change is left as it is: what it shows may have cost something.
const live = document.querySelector("[data-live], .chart[data-chart], #view");
const before = new Map();

function times(root) {
  for (const time of root.querySelectorAll("time[datetime]")) {
    time.textContent = zone.format(new Date(1000 * Number(time.getAttribute("datetime"))));
  }
}

function typing(part) {
  const focused = document.activeElement;
  if (part.contains(focused) && focused.matches("textarea, select, input:not([type=hidden])")) return true;
  return [...part.querySelectorAll("input:not([type=checkbox]), textarea")].some((field) => field.value !== field.defaultValue);
}

// The same thing in a part that was replaced.
function key(element) {
  const form = element.closest("form");
  return [element.tagName, element.getAttribute("href"), form?.getAttribute("action"), element.textContent.trim()].join(" ");
}

function replace(part, html) {
  const focused = part.contains(document.activeElement) ? key(document.activeElement) : null;
  const open = [...part.querySelectorAll("details")].map((one) => one.open);
  const inner = () => [part, ...part.querySelectorAll(SCROLLED)];
  const places = inner().map((one) => [one.scrollTop, one.scrollLeft, one.scrollHeight - one.scrollTop - one.clientHeight < 40]);
  part.innerHTML = html;
  part.querySelectorAll("details").forEach((one, i) => { if (open[i]) one.open = true; });
  inner().forEach((one, i) => {
    const [top, left, atEnd] = places[i] ?? [0, 0, true];
    one.scrollLeft = left;
    one.scrollTop = atEnd && one.matches(".chat, .log") ? one.scrollHeight : top;
  });
  if (focused) {
    [...part.querySelectorAll("a, button, summary")].find((one) => key(one) === focused)?.focus({ preventScroll: true });
  }
}

let [busy, again] = [false, false];

async function renew() {
  if (busy) {
    again = true;
    return;
  }
  busy = true;
  try {
    const answer = await fetch(main.dataset.at, { headers: { Accept: "text/html" } });
    if (answer.redirected && new URL(answer.url).pathname === "/login") {
      location.assign(`/login?next=${encodeURIComponent(main.dataset.at)}`);
      return;
    }
    if (!answer.ok) return;
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    times(fresh);
    for (const part of document.querySelectorAll("[data-live]")) {
      const other = fresh.querySelector(`[data-live="${part.dataset.live}"]`);
      if (!other || other.innerHTML === before.get(part.dataset.live) || typing(part)) continue;
      before.set(part.dataset.live, other.innerHTML);
      replace(part, other.innerHTML);
    }
    document.dispatchEvent(new CustomEvent("renewed", { detail: fresh }));
  } finally {
    busy = false;
  }
  if (again) {
    again = false;
    setTimeout(look, 1000);
  }
}

function broker(state) {
  const shown = document.querySelector("#broker");
  if (!shown) return;
  shown.textContent = state === "lost" ? "manager not reached" : `broker ${state}`;
  shown.className = `state ${state === "up" ? "good" : "bad"}`;
}

function look() {
  if (live && document.visibilityState === "visible") renew().catch(() => broker("lost"));
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

// What was asked for is asked for once, and it shows.
document.addEventListener("submit", ({ target: form }) => {
  setTimeout(() => {  // afterwards, since buttons that are disabled are not sent
    for (const button of form.querySelectorAll("button")) button.disabled = true;
    form.setAttribute("aria-busy", "true");
  });
});
addEventListener("pageshow", () => {
  for (const form of document.querySelectorAll("form[aria-busy]")) {
    form.removeAttribute("aria-busy");
    for (const button of form.querySelectorAll("button")) button.disabled = false;
  }
});

times(document);
for (const box of document.querySelectorAll(".log, .chat")) box.scrollTop = box.scrollHeight;
for (const part of document.querySelectorAll("[data-live]")) before.set(part.dataset.live, part.innerHTML);

// A browser keeps but six connections to one place: pages that nobody sees have none.
let source = null;
let known = Number(main?.dataset.version);

function listen() {
  if (source || document.visibilityState !== "visible") return;
  source = new EventSource(`/events?since=${known}`);
  source.onmessage = (message) => {
    const told = JSON.parse(message.data);
    broker(told.broker);
    if (told.version === known) return;
    known = told.version;
    look();
  };
  source.onerror = () => {
    broker("lost");
    if (source?.readyState === EventSource.CLOSED) {  // it was refused: the manager is another one
      source = null;
      setTimeout(() => { look(); listen(); }, 3000);
    }
  };
}

if (main) {
  listen();
  document.addEventListener("visibilitychange", () => {
    if (document.visibilityState === "visible") {
      listen();
      look();
    } else {
      source?.close();
      source = null;
    }
  });
}
