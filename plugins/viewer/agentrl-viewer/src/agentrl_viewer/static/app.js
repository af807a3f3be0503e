// The frame of the page: head, routes, keys, and the live tail.

import { configs } from "viewer/configs";
import { curves } from "viewer/curves";
import { exported, get, leftOut } from "viewer/data";
import { color, h, hideTip, plural } from "viewer/dom";
import { list } from "viewer/list";
import { time } from "viewer/time";
import { compare, trajectory } from "viewer/trajectory";

const ROUTES = { curves, configs, trajectories: list, trajectory, compare, time };
const TABS = { curves: "Curves", trajectories: "Trajectories", time: "Time", configs: "Configuration" };
const PARENT = { trajectory: "trajectories", compare: "trajectories" };
const POLL_MS = 2000;

const root = document.getElementById("app");
const view = h("main", { id: "view" });
const nav = h("nav", { "aria-label": "Pages" });
const state = h("div", { class: "runs" });
const app = {
  runs: [],
  hidden: new Set(),
  listQuery: null,
  listPosition: null,
  css: (name) => `var(--run-${app.runs.findIndex((run) => run.name === name) % 8})`,
  color: (name) => color(app.css(name).slice(4, -1)),
  go: (hash) => { location.hash = hash; },
};
let page = {};
let arrival = 0;

function theme(next) {
  document.documentElement.dataset.theme = next;
  dispatchEvent(new Event("themechange"));
}

function head() {
  const help = h("dialog", { class: "help", onclick: (event) => event.target === help && help.close() }, h("h3", {}, "Keys"), h("dl", {}, [
    ["1 – 4", "curves, trajectories, time, configuration"], ["/", "filter"], ["j  k", "next and previous"],
    ["Enter", "open"], ["t", "chat, tokens, record"], ["Esc", "back"], ["d", "dark or light"], ["?", "this help"],
  ].map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])));
  app.help = help;
  root.replaceChildren(h("header", { class: "top" },
    h("a", { class: "brand", href: "#/curves" }, h("b", {}, "agentrl"), " view"), nav, state,
    h("button", { class: "icon", title: "Dark or light  d", "aria-label": "Dark or light", onclick: flip }, "◐"),
    h("button", { class: "icon", title: "Keys  ?", "aria-label": "Keys", onclick: () => help.showModal() }, "?")),
  ...(leftOut ? [h("p", { class: "banner" }, `An exported file: it leaves out ${leftOut.toLocaleString("en")} of the runs' trajectories.`)] : []), view, help);
}

const flip = () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
const preferred = matchMedia("(prefers-color-scheme: dark)");
const follow = () => theme(preferred.matches ? "dark" : "light");
preferred.addEventListener("change", follow);

function showRuns() {
  state.replaceChildren(...app.runs.map((run) => h("span", { class: "run", title: run.path },
    h("i", { class: `dot${run.status === "running" ? " live" : ""}`, style: { background: app.css(run.name) } }), h("b", {}, run.name),
    run.problem ? h("small", { class: "error", title: run.problem }, "not everything can be shown")
      : h("small", { class: `status ${run.status}` }, run.indexing.files ? `indexing ${run.indexing.done}/${run.indexing.files}`
      : `${run.status} · step ${run.step}${run.steps ? `/${run.steps}` : ""}`))));
}

async function route() {
  const [name, text] = location.hash.replace(/^#\//, "").split("?");
  const target = ROUTES[name] ? name : "curves";
  const mine = ++arrival;
  page.close?.();
  hideTip();
  page = {};
  nav.replaceChildren(...Object.entries(TABS).map(([key, label]) => h("a", { href: `#/${key}`,
    "aria-current": (PARENT[target] ?? target) === key ? "page" : null }, label)));
  const fresh = h("main", { id: "view", "data-page": target });
  try {
    const next = await ROUTES[target](fresh, app, Object.fromEntries(new URLSearchParams(text ?? "")));
    if (mine !== arrival) return next.close?.();
    page = next;
  } catch (error) {
    fresh.replaceChildren(h("p", { class: "empty error" }, String(error.message ?? error)));
  }
}

// Replaces the shown page at once, so that charts can measure their place.
for (const name of Object.keys(ROUTES)) {
  const draw = ROUTES[name];
  ROUTES[name] = (fresh, ...rest) => {
    document.getElementById("view").replaceWith(fresh);
    return draw(fresh, ...rest);
  };
}

async function poll() {
  try {
    const runs = await get("runs");
    const before = app.runs.map((run) => run.version).join();
    app.runs = runs;
    root.classList.remove("lost");
    showRuns();
    if (before && before !== runs.map((run) => run.version).join()) await page.changed?.();
  } catch {
    root.classList.add("lost");
    state.replaceChildren(h("span", { class: "error" }, "no answer from agentrl view: is it still running?"));
  }
  if (!exported) setTimeout(poll, POLL_MS);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName) && event.target.type !== "checkbox" && event.target.type !== "range";
  if (typing) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  if (app.help.open) return;
  const tab = Object.keys(TABS)[+event.key - 1];
  const search = document.querySelector("[data-search]");
  const own = { "?": () => app.help.showModal(), d: flip, ...(search ? { "/": () => search.focus() } : {}) };
  const action = page.keys?.[event.key] ?? own[event.key] ?? (tab && (() => app.go(`#/${tab}`)));
  // A focused link or button has its own Enter.
  if (!action || (event.key === "Enter" && /^(A|BUTTON|SUMMARY)$/.test(event.target.tagName))) return;
  event.preventDefault();
  action();
});

head();
follow();
addEventListener("hashchange", route);
await poll();
await route();
document.title = `${app.runs.length === 1 ? app.runs[0].name : plural(app.runs.length, "run")} · agentrl view`;
