// The trajectories of a run: filters, and a list that holds only the rows in view and asks for pages as it scrolls.

import { exported, get, leftOut } from "viewer/data";
import { h, number, plural, rewardBadge, seconds, terminationBadge } from "viewer/dom";

const ROW = 46;
const PAGE = 100;
const ORDERS = {
  newest: "newest first", failed: "failed first", oldest: "oldest first", "-reward": "highest reward", reward: "lowest reward",
  "-tokens": "longest", "-seconds": "slowest",
};

export const at = (run, row) => "#/trajectory?" + new URLSearchParams({ run, split: row.split, step: row.step, line: row.line });

export async function list(view, app, query) {
  const run = app.runs.some((each) => each.name === query.run) ? query.run : app.runs[0].name;
  const asked = { order: "newest", ...query, run };
  app.listQuery = asked;
  const first = get("list", { ...asked, offset: 0, limit: PAGE });
  const facets = await get("facets", { run });
  const pages = new Map();
  let total = 0;
  let selected = -1;
  let generation = 0;

  const set = (name, value) => {
    const next = { ...asked, [name]: value };
    const given = Object.entries(next).filter(([, each]) => each !== "" && each !== undefined && each !== null);
    app.go("#/trajectories?" + new URLSearchParams(given));
  };
  const field = (label, name, attributes) => h("label", { class: "field" }, h("span", {}, label),
    h("input", { name, value: asked[name] ?? "", ...attributes, onchange: (event) => set(name, event.target.value) }));
  const choice = (label, name, options) => h("label", { class: "field" }, h("span", {}, label),
    h("select", { name, onchange: (event) => set(name, event.target.value) },
      options.map(([value, text]) => h("option", { value, selected: (asked[name] ?? "") === value }, text))));
  const terminations = Object.entries(facets.terminations).sort();
  const filters = h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
    app.runs.length > 1 && choice("run", "run", app.runs.map((each) => [each.name, each.name])),
    field("text", "text", { type: "search", "data-search": true, placeholder: "in the conversation  /" }),
    choice("split", "split", [["", "all"], ["train", "train"], ["validation", "validation"]]),
    h("div", { class: "pair" }, field("step from", "first_step", { type: "number", min: 0 }), field("to", "last_step", { type: "number", min: 0 })),
    h("div", { class: "pair" }, field("reward from", "min_reward", { type: "number", step: "any" }), field("to", "max_reward", { type: "number", step: "any" })),
    choice("termination", "termination", [["", "all"], ["failed", "failed or skipped"],
      ...terminations.map(([name, count]) => [name, `${name} (${count.toLocaleString("en")})`])]),
    choice("tool", "tool", [["", "any or none"], ...facets.tools.map((name) => [name, name])]),
    choice("error", "error", [["", "with and without"], ["*", "with an error"],
      ...(asked.error && asked.error !== "*" ? [[asked.error, asked.error]] : [])]),
    choice("order", "order", Object.entries(ORDERS)),
    (asked.uid || asked.prompt) && h("button", { type: "button", class: "chip", onclick: () => {
      delete asked.prompt;
      set("uid", "");
    } }, asked.uid ? `prompt ${asked.uid}  ×` : "same prompt  ×"),
    h("button", { type: "button", onclick: () => app.go("#/trajectories?" + new URLSearchParams({ run })) }, "Reset"));
  const count = h("span", { class: "count", role: "status" });
  const spacer = h("div", { class: "spacer" });
  const scroller = h("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "Trajectories" }, spacer);
  const note = exported && leftOut ? h("span", { class: "note" }, `this file leaves out ${plural(leftOut, "trajectory").replace(/ys$/, "ies")}`) : "";
  view.replaceChildren(h("div", { class: "columns" }, h("aside", {}, h("details", { open: innerWidth > 760, class: "filter-fold" },
    h("summary", {}, "Filters"), filters)),
  h("section", { class: "list-pane" }, h("div", { class: "list-head" }, count, note), scroller)));

  async function page(number_) {
    if (pages.has(number_)) return;
    pages.set(number_, null);
    const mine = generation;
    const found = await (number_ === 0 && generation === 0 ? first : get("list", { ...asked, offset: number_ * PAGE, limit: PAGE }));
    if (mine !== generation) return;
    pages.set(number_, found.rows);
    if (total !== found.total || number_ === 0) {
      total = found.total;
      count.textContent = total === 1 ? "1 trajectory" : `${total.toLocaleString("en")} trajectories`;
    }
    draw();
  }

  // Browsers limit the height of an element: beyond it, a pixel of scrolling is more than a pixel of list.
  const LIMIT = 8_000_000;
  function draw() {
    const real = total * ROW;
    const height = Math.min(real, LIMIT);
    spacer.style.height = `${height}px`;
    const view_ = scroller.clientHeight;
    const top = real > LIMIT ? (scroller.scrollTop / Math.max(height - view_, 1)) * (real - view_) : scroller.scrollTop;
    const first = Math.max(0, Math.floor(top / ROW) - 4);
    const last = Math.min(total, Math.ceil((top + view_) / ROW) + 4);
    const shown = [];
    for (let i = first; i < last; i++) {
      const rows = pages.get(Math.floor(i / PAGE));
      if (rows === undefined) page(Math.floor(i / PAGE));
      const line = rows ? item(rows[i % PAGE], i) : h("div", { class: "row loading" }, "…");
      line.style.top = `${scroller.scrollTop + i * ROW - top}px`;
      shown.push(line);
    }
    spacer.replaceChildren(...shown);
    if (!total) spacer.replaceChildren(h("p", { class: "empty" }, "No trajectory matches."));
  }

  function item(row, i) {
    return h("a", { class: `row${row.problem > 1 ? " failed" : ""}`, role: "option", "aria-selected": String(i === selected), href: at(run, row),
      onclick: () => { app.listPosition = { rows: pages, index: i, total }; } },
    h("span", { class: "where" }, h("b", {}, `step ${row.step}`), h("small", {}, `${row.split === "validation" ? "val" : "train"} · ${row.sample}${row.branch ? ` · branch ${row.branch + 1}` : ""}`)),
    rewardBadge(row.reward),
    h("span", { class: "what" }, h("span", { class: "question" }, row.question || "–"),
      h("small", { class: row.error ? "error" : "" }, row.error ? row.error.trim().split("\n").at(-1) : row.answer || "–")),
    h("span", { class: "facts" }, terminationBadge(row.termination),
      row.calls > 0 && h("span", { class: `badge tools${row.failed_calls ? " bad" : ""}`, title: row.tools.join(", ") },
        `${plural(row.calls, "call")}${row.failed_calls ? `, ${row.failed_calls} failed` : ""}`),
      h("small", {}, `${plural(row.tokens, "token")} · ${seconds(row.seconds)}`)));
  }

  function move(by) {
    selected = Math.max(0, Math.min(total - 1, selected + by));
    const top = selected * ROW;
    if (top < scroller.scrollTop) scroller.scrollTop = top;
    if (top + ROW > scroller.scrollTop + scroller.clientHeight) scroller.scrollTop = top + ROW - scroller.clientHeight;
    draw();
  }

  scroller.addEventListener("scroll", () => requestAnimationFrame(draw));
  const resized = () => draw();
  addEventListener("resize", resized);
  await page(0);
  scroller.focus({ preventScroll: true });
  return {
    keys: {
      j: () => move(1), k: () => move(-1), ArrowDown: () => move(1), ArrowUp: () => move(-1),
      Enter: () => {
        const row = pages.get(Math.floor(selected / PAGE))?.[selected % PAGE];
        if (row) app.go(at(run, row));
      },
    },
    changed: async () => {
      // Rows of another moment must not mix with new ones.
      generation++;
      pages.clear();
      await page(0);
    },
    close: () => removeEventListener("resize", resized),
  };
}
