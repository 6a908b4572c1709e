// Live pages, forms and keys. Every page works without this file.
"use strict";

const REFRESH_MS = 5000, TIMEOUT_MS = 20_000, NEXT_KEY_MS = 1500;
const PAGES = { o: "/", t: "/tasks", w: "/workers" };
const PREFIX = document.body.dataset.prefix;
const HEALTH = document.getElementById("health"), TITLE = document.title.slice(HEALTH.dataset.mark.length);
const SIGNED_OUT = "Another page answered instead of the console, so your session has probably ended.";

// Return the page that the console answers. Raise an error with the reason if it does not, or if a proxy answers.
async function ask(address) {
  let answer, text;
  try {
    // A redirect would lead to a login, which may be a page of this origin or one that the policy does not let us read.
    answer = await fetch(address, { redirect: "manual", signal: AbortSignal.timeout(TIMEOUT_MS) });
    text = await answer.text();
  } catch {
    throw new Error("The console did not answer.");
  }
  const page = new DOMParser().parseFromString(text, "text/html");
  if (!answer.headers.has("Outbox-Console")) {
    const failed = answer.status === 404 || answer.status === 429 || answer.status >= 500;
    throw new Error(failed ? `A proxy answered instead of the console: status ${answer.status}.` : SIGNED_OUT);
  }
  const again = { afterSeconds: answer.headers.get("Retry-After") };
  if (!answer.ok) throw Object.assign(new Error(`${page.querySelector("h1")?.textContent}.`), again);
  return page;
}

// Let rows and headings keep their elements, and so focus and selection, while others come and go. Spaces between them
// all look alike, so that the morph would match those of different parts.
function nameParts(root) {
  for (const node of [...root.childNodes]) if (node.nodeType === Node.TEXT_NODE && !node.data.trim()) node.remove();
  for (const heading of root.querySelectorAll("h2")) heading.id ||= heading.textContent;
  root.querySelectorAll("table").forEach((table, number) => {
    for (const row of table.tBodies[0].rows) {
      const names = [row.querySelector("th")?.textContent, row.querySelector("a")?.getAttribute("href")];
      row.id ||= JSON.stringify([number, ...names]);
    }
  });
}

function update(page) {
  const isStill = "still" in document.getElementById("live").dataset;
  // A person who is about to press a button there must not find another one below the pointer.
  const isHeld = document.querySelector("#live form:is(:hover, :focus-within)");
  const state = HEALTH.dataset.state;
  const ids = isStill || isHeld ? ["health", "person"] : ["health", "person", "live"];
  if (!ids.every((id) => page.getElementById(id))) throw new Error("The console's answer is incomplete.");
  // What a person opens stays open, and a plot keeps the focus.
  const kept = { DETAILS: "open", INPUT: "checked", svg: "tabindex" };
  const callbacks = {
    beforeAttributeUpdated: (name, element) => kept[element.tagName] !== name,
    beforeNodeMorphed: (element) => element.tagName !== "OUTPUT",
  };
  for (const id of ids) {
    const [old, found] = [document.getElementById(id), page.getElementById(id)];
    nameParts(old);
    nameParts(found);
    Idiomorph.morph(old, found, { callbacks });
  }
  document.title = HEALTH.dataset.mark + TITLE;
  if (HEALTH.dataset.state !== state) document.getElementById("changed").textContent = HEALTH.textContent;
  showTimes();
  showMinute();
  if (isStill || isHeld) return;
  const actions = (root) => [...root.querySelectorAll("main form[method=post]")].map((form) => form.getAttribute("action"));
  const offered = new Set(actions(page));
  for (const form of document.querySelectorAll("main form[method=post]")) {
    if (offered.has(form.getAttribute("action"))) continue;
    const note = Object.assign(document.createElement("p"), { className: "note" });
    note.textContent = "This is no longer possible, because the state has changed. Reload the page.";
    (form.closest("section") ?? form).replaceWith(note);
  }
}

// Times are in UTC, or in the time of the reader, who chooses once. The title has both. Short ones are below a zone.
const TIMES = "outbox-times", BUTTON = document.getElementById("times");
let isLocal = false;
try {
  isLocal = localStorage.getItem(TIMES) === "local";
} catch {
  // A policy may block the data of sites. The choice then holds for this page.
}
const zone = () => isLocal ? Intl.DateTimeFormat().resolvedOptions().timeZone : "UTC";
function showTimes() {
  for (const each of document.querySelectorAll("time[datetime], [data-time]")) {
    const time = new Date(each.getAttribute("datetime") ?? each.dataset.time);
    if (Number.isNaN(time.getTime())) continue; // the text stays
    const [day, clock] = [time.toLocaleDateString("sv"), time.toLocaleTimeString("sv")];
    const part = each.querySelector(".copied") ?? each;
    const utc = (part.dataset.utc ??= part.textContent);
    const local = utc.length < 6 ? clock.slice(0, 5) : utc.replace(/\d{4}-.* UTC/, `${day} ${clock} ${zone()}`);
    part.textContent = isLocal ? local : utc;
    if (each.tagName === "TIME") each.title = `${time.toISOString().slice(0, 19).replace("T", " ")} UTC, ${day} ${clock} here`;
  }
  for (const each of document.querySelectorAll("[data-zone]")) each.textContent = zone();
  BUTTON.hidden = false;
  BUTTON.textContent = isLocal ? "Show times in UTC" : "Show local times";
}
BUTTON.addEventListener("click", () => {
  isLocal = !isLocal;
  try {
    localStorage.setItem(TIMES, isLocal ? "local" : "utc");
  } catch {
    // as above
  }
  showTimes();
  showMinute();
});
showTimes();

// The values of one minute of a chart: below the pointer, or chosen with the arrow keys while the plot has the focus.
let chosen = { title: null, at: 0 };
const titleOf = (plot) => plot.closest("figure").querySelector("strong").textContent;
function showMinute() {
  for (const plot of document.querySelectorAll("svg.plot")) {
    plot.setAttribute("tabindex", "0");
    const [figure, line] = [plot.closest("figure"), plot.querySelector(".cursor")];
    const minutes = plot.dataset.minutes.split("|");
    let text = "";
    if (chosen.title === titleOf(plot)) {
      chosen.at = Math.max(0, Math.min(chosen.at, minutes.length - 1));
      const time = new Date(Date.parse(plot.dataset.first) + 60_000 * chosen.at);
      const names = [...figure.querySelectorAll(".legend > span")].map((each) => each.childNodes[1].data.trim());
      const values = minutes[chosen.at].split(";").map((value, number) => `${names[number]} ${value}`);
      text = `${isLocal ? time.toLocaleTimeString("sv").slice(0, 5) : time.toISOString().slice(11, 16)} ${zone()}: ${values.join(" · ")}`;
      for (const end of ["x1", "x2"]) line.setAttribute(end, `${(100 * (chosen.at + 0.5)) / minutes.length}%`);
    }
    line.setAttribute("visibility", text ? "visible" : "hidden");
    const output = figure.querySelector("output");
    if (output.textContent !== text) output.textContent = text; // a screen reader reads it again after each write
  }
}
document.addEventListener("pointermove", ({ target, clientX }) => {
  const plot = target.closest("svg.plot");
  if (!plot && (chosen.title === null || document.activeElement.closest("svg.plot"))) return;
  if (!plot) {
    chosen.title = null;
    showMinute();
    return;
  }
  const { left, width } = plot.getBoundingClientRect(), number = plot.dataset.minutes.split("|").length;
  chosen = { title: titleOf(plot), at: Math.floor((number * (clientX - left)) / width) };
  showMinute();
});
document.addEventListener("keydown", (event) => {
  const plot = event.target.closest("svg.plot"), step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!plot || !step) return;
  event.preventDefault();
  chosen = { title: titleOf(plot), at: chosen.title === titleOf(plot) ? chosen.at + step : Infinity };
  showMinute();
});
showMinute();

function warn(text) {
  // The sentence about the last figures may say that all is well.
  HEALTH.hidden = true;
  document.title = `Not current · ${TITLE}`;
  const stale = document.getElementById("stale"), sentence = stale.querySelector("span");
  if (sentence.textContent !== text) sentence.textContent = text; // a screen reader reads it again after each write
  stale.hidden = false;
}

let isAsking = false, notBefore = 0, answeredAt = Date.now();
async function refresh() {
  if (document.visibilityState !== "visible") return;
  // The tab was hidden, or the console is slow.
  const age = Date.now() - answeredAt, stale = document.getElementById("stale");
  if (age > 3 * REFRESH_MS && stale.hidden) warn(`The console last answered ${Math.round(age / 1000)} seconds ago.`);
  if (isAsking || Date.now() < notBefore) return;
  isAsking = true;
  try {
    update(await ask(document.getElementById("live").dataset.refresh));
    stale.hidden = true;
    answeredAt = Date.now();
  } catch (error) {
    // A console without a place is busy with other people.
    notBefore = Date.now() + 1_000 * (error.afterSeconds ?? 0);
    warn(error.message);
  } finally {
    isAsking = false;
  }
}
setInterval(refresh, REFRESH_MS);
document.addEventListener("visibilitychange", refresh);

// The policy blocks a redirect of a form to another origin's login without a word. So ask first whether the console
// answers, and keep the form if it does not.
let isSending = false;
document.addEventListener("submit", async (event) => {
  const { target: form, submitter } = event;
  if (isSending) return;
  event.preventDefault();
  if (form.ariaBusy === "true") return;
  form.ariaBusy = "true";
  form.querySelector(".unsent")?.remove();
  try {
    await ask(`${PREFIX}/signed-in`);
    isSending = true;
    form.requestSubmit(submitter);
  } catch (error) {
    const note = Object.assign(document.createElement("p"), { className: "problem unsent", role: "alert" });
    const link = Object.assign(document.createElement("a"), { href: `${PREFIX}/`, target: "_blank" });
    link.textContent = "Open the console in a new tab";
    note.append(`${error.message} Nothing was sent. `, link, ", sign in there if it asks, and then try again here.");
    form.append(note);
  } finally {
    isSending = false;
    form.ariaBusy = null;
  }
});

let pressed_g = 0;
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
  const search = document.getElementById("search");
  if (event.key === "/") {
    event.preventDefault();
    search.focus();
  } else if (event.key === "?") {
    document.querySelector("footer").scrollIntoView();
  } else if (event.key === "g") {
    pressed_g = event.timeStamp;
  } else if (PAGES[event.key] && event.timeStamp - pressed_g < NEXT_KEY_MS) {
    location.assign(PREFIX + PAGES[event.key]);
  }
});
