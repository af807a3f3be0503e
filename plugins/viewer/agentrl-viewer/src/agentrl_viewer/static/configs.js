// One table of all configuration keys; by default those in which the runs differ.

import { get } from "viewer/data";
import { h } from "viewer/dom";

const kept = { all: false, search: "" };

export async function configs(view, app) {
  const loaded = await Promise.all(app.runs.map((run) => get("config", { run: run.name })));
  const keys = [...new Set(loaded.flatMap(Object.keys))].sort();
  const differs = (key) => loaded.some((config) => config[key] !== loaded[0][key]);
  if (app.runs.length === 1) kept.all = true;
  const table = h("div", { class: "table-wrap" });

  function draw() {
    const shown = keys.filter((key) => (kept.all || differs(key)) && key.toLowerCase().includes(kept.search.toLowerCase()));
    const head = h("tr", {}, h("th", {}, "key"), app.runs.map((run) =>
      h("th", {}, h("i", { class: "dot", style: { background: app.css(run.name) } }), run.name)));
    const rows = shown.map((key) => h("tr", { class: differs(key) ? "differs" : "" }, h("th", { scope: "row" }, key),
      loaded.map((config) => h("td", {}, config[key] ?? h("span", { class: "dim" }, "absent")))));
    table.replaceChildren(rows.length ? h("table", { class: "config" }, h("thead", {}, head), h("tbody", {}, rows))
      : h("p", { class: "empty" }, "The configurations are equal."));
  }

  view.replaceChildren(h("div", { class: "controls" },
    h("input", { type: "search", placeholder: "Filter keys  /", value: kept.search, "data-search": true, "aria-label": "Filter keys",
      oninput: (event) => { kept.search = event.target.value; draw(); } }),
    app.runs.length > 1 && h("label", {}, h("input", { type: "checkbox", checked: kept.all,
      onchange: (event) => { kept.all = event.target.checked; draw(); } }), " also equal keys")), table);
  draw();
  return {};
}
