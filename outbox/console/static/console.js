// Live pages and keys. Every page works without this file.
"use strict";

const REFRESH_MS = 5000;
const PAGES = { o: "/", t: "/tasks", w: "/workers" };
const NEXT_KEY_MS = 1500;

setInterval(() => {
  if (document.visibilityState === "visible") htmx.trigger(document.body, "refresh");
}, REFRESH_MS);
document.addEventListener("visibilitychange", () => {
  if (document.visibilityState === "visible") htmx.trigger(document.body, "refresh");
});

const stale = (hidden) => () => { document.getElementById("stale").hidden = hidden; };
for (const name of ["htmx:responseError", "htmx:sendError"]) document.body.addEventListener(name, stale(false));
document.body.addEventListener("htmx:afterSwap", stale(true));

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
    location.assign(document.body.dataset.prefix + PAGES[event.key]);
  }
});
