// Curves of every metric, all runs in one chart each, drawn when they scroll into view.

import { get } from "viewer/data";
import { breakable, color, h, hideTip, number, plural, seconds, showTip } from "viewer/dom";

const FIRST = [
  /^reward\/mean$/, /^validation\/.*accuracy/, /^actor\/entropy$/, /^response_length\/mean$/,
  /^rollout\/tool_call_share$/, /^rollout\/turns_mean$/, /^actor\/grad_norm$/, /^timing\/step$/, /^perf\/tokens_per_second$/,
];
const kept = { smooth: 0, axis: "step", search: "", open: new Set(["overview"]) };

// Exponential average that is not drawn towards its first value.
export function smoothed(values, weight) {
  if (!weight) return values;
  let sum = 0;
  let scale = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = sum * weight + value * (1 - weight);
    scale = scale * weight + 1 - weight;
    return sum / scale;
  });
}

// Metric names by what stands before the first slash, and those that people look at first.
function sections(names) {
  const groups = new Map();
  const overview = FIRST.flatMap((pattern) => names.filter((name) => pattern.test(name)).slice(0, 2));
  if (overview.length) groups.set("overview", overview);
  for (const name of names) {
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
    groups.set(group, [...(groups.get(group) ?? []), name]);
  }
  return groups;
}

export async function curves(view, app) {
  const charts = new Map();
  let loaded = [];
  const grid = h("div", { class: "sections" });
  const controls = h("div", { class: "controls" },
    h("input", { type: "search", placeholder: "Filter metrics  /", value: kept.search, "data-search": true,
      "aria-label": "Filter metrics", oninput: (event) => { kept.search = event.target.value; draw(); } }),
    h("label", {}, "Smoothing ",
      h("input", { type: "range", min: 0, max: 0.99, step: 0.01, value: kept.smooth, "aria-label": "Smoothing",
        oninput: (event) => { kept.smooth = +event.target.value; charts.forEach((chart) => chart.update()); } })),
    h("div", { class: "switch", role: "group", "aria-label": "Axis" }, ["step", "time"].map((axis) =>
      h("button", { "aria-pressed": String(kept.axis === axis), onclick: (event) => {
        kept.axis = axis;
        for (const each of event.target.parentNode.children) each.setAttribute("aria-pressed", String(each === event.target));
        charts.forEach((chart) => chart.rebuild());
      } }, axis))),
    h("div", { class: "legend" }, app.runs.map((run) => h("label", { class: "key" },
      h("input", { type: "checkbox", checked: !app.hidden.has(run.name), onchange: (event) => {
        if (event.target.checked) app.hidden.delete(run.name);
        else app.hidden.add(run.name);
        charts.forEach((chart) => chart.rebuild());
      } }),
      h("i", { style: { background: app.css(run.name) } }), run.name))));
  const warnings = h("div", { role: "status" });
  view.replaceChildren(controls, warnings, grid);

  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      if (entry.isIntersecting) entry.target.chart.rebuild();
      else entry.target.chart.drop();
    }
  }, { rootMargin: "300px" });
  const resized = new ResizeObserver((entries) => entries.forEach((entry) => entry.target.chart.resize()));

  function draw() {
    seen.disconnect();
    resized.disconnect();
    charts.forEach((chart) => chart.drop());
    charts.clear();
    const names = [...new Set(loaded.flatMap((run) => Object.keys(run.values)))].sort();
    const words = kept.search.toLowerCase().split(/\s+/).filter(Boolean);
    const matching = names.filter((name) => words.every((word) => name.toLowerCase().includes(word)));
    const groups = words.length ? new Map([["found", matching]]) : sections(names);
    grid.replaceChildren(...[...groups].map(([group, members]) => {
      const cards = h("div", { class: "cards" });
      const fill = () => {
        if (!cards.childElementCount) cards.append(...members.map((name) => card(group, name)));
      };
      if (words.length || kept.open.has(group)) fill();
      return h("details", { class: "section", open: words.length > 0 || kept.open.has(group), ontoggle: (event) => {
        if (event.target.open) { kept.open.add(group); fill(); } else kept.open.delete(group);
      } }, h("summary", {}, h("b", {}, group), h("span", { class: "dim" }, plural(members.length, "metric"))), cards);
    }));
    if (!names.length) grid.replaceChildren(h("p", { class: "empty" }, "No metrics yet: the first step has not ended."));
  }

  function card(group, name) {
    const body = h("div", { class: "plot" });
    const value = h("span", { class: "last" });
    const element = h("figure", { class: "card", "data-metric": name }, h("figcaption", {},
      h("span", { class: "name" }, breakable(name)), value,
      h("button", { class: "icon", title: "Enlarge", "aria-label": `Enlarge ${name}`,
        onclick: () => { element.classList.toggle("wide"); element.chart.rebuild(); } }, "⤢")), body);
    element.chart = new Chart(name, body, value, () => loaded, app);
    charts.set(`${group}:${name}`, element.chart);
    seen.observe(element);
    resized.observe(element);
    return element;
  }

  // What the runs have warned of.
  function warn() {
    const found = app.runs.flatMap((run) => run.warnings.map((each) => h("li", {}, app.runs.length > 1 && h("b", {}, `${run.name}  `),
      each.message, each.over && h("span", { class: "dim" }, "  It is over."))));
    warnings.replaceChildren(...(found.length ? [h("section", { class: "panel warnings" }, h("h3", {}, plural(found.length, "warning")), h("ul", {}, found))] : []));
  }

  async function load() {
    warn();
    loaded = await Promise.all(app.runs.map(async (run) => ({ name: run.name, ...(await get("series", { run: run.name })) })));
  }
  const themed = () => charts.forEach((chart) => chart.rebuild());
  addEventListener("themechange", themed);
  await load();
  draw();
  return {
    changed: async () => {
      const before = loaded.flatMap((run) => Object.keys(run.values)).length;
      await load();
      if (loaded.flatMap((run) => Object.keys(run.values)).length !== before) draw();
      else charts.forEach((chart) => chart.update());
    },
    close: () => {
      removeEventListener("themechange", themed);
      seen.disconnect();
      resized.disconnect();
      charts.forEach((chart) => chart.drop());
    },
  };
}

class Chart {
  constructor(name, body, value, loaded, app) {
    Object.assign(this, { name, body, value, loaded, app, plot: null });
  }

  get runs() {
    return this.loaded().filter((run) => !this.app.hidden.has(run.name) && run.values[this.name]);
  }

  data() {
    const tables = this.runs.map((run) => {
      const first = run.times.find((time) => time !== null) ?? 0;
      const at = run.steps.map((step, i) => (kept.axis === "step" ? step : (run.times[i] ?? first) - first));
      const points = at.map((x, i) => [x, run.values[this.name][i]]).filter(([, y]) => y !== null);
      const xs = points.map(([x]) => x);
      return [xs, smoothed(points.map(([, y]) => y), kept.smooth)];
    });
    return tables.length ? uPlot.join(tables) : [[]];
  }

  drop() {
    this.plot?.destroy();
    this.plot = null;
  }

  size() {
    return { width: Math.max(this.body.clientWidth, 120), height: this.body.clientHeight || 150 };
  }

  resize() {
    const { width, height } = this.size();
    if (this.plot && (this.plot.width !== width || this.plot.height !== height)) this.plot.setSize({ width, height });
  }

  rebuild() {
    this.drop();
    const runs = this.runs;
    const lasts = runs.map((run) => run.values[this.name].findLast((value) => value !== null));
    this.value.replaceChildren(...runs.map((run, i) => h("span", { style: { color: this.app.css(run.name) } }, number(lasts[i]))));
    if (!runs.length) return;
    const grid = { stroke: color("--line"), width: 1 };
    const axis = { stroke: color("--dim"), grid, ticks: { show: false }, font: "11px system-ui", size: 26 };
    const points = { show: runs.every((run) => run.values[this.name].filter((value) => value !== null).length < 12), size: 5 };
    this.plot = new uPlot({
      ...this.size(),
      legend: { show: false },
      cursor: { y: false, points: { size: 6 } },
      scales: { x: { time: false } },
      axes: [
        { ...axis, values: (_, ticks) => ticks.map((tick) => (kept.axis === "step" ? tick : seconds(tick))) },
        { ...axis, size: 48, values: (_, ticks) => ticks.map((tick) => number(tick)) },
      ],
      series: [{}, ...runs.map((run) => ({ stroke: this.app.color(run.name), width: 1.6, spanGaps: true, points }))],
      hooks: { setCursor: [(plot) => this.hover(plot, runs)] },
    }, this.data(), this.body);
    this.body.onmouseleave = hideTip;
  }

  hover(plot, runs) {
    const { idx, left, top } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) return hideTip();
    const box = plot.over.getBoundingClientRect();
    const x = plot.data[0][idx];
    const lines = runs.map((run, i) => [run.name, number(plot.data[i + 1][idx], 4)]);
    showTip({ clientX: box.left + left, clientY: box.top + top }, kept.axis === "step" ? `step ${x}` : seconds(x), lines);
  }

  update() {
    if (this.plot && this.plot.series.length === this.runs.length + 1) {
      this.plot.setData(this.data());
      const lasts = this.runs.map((run) => [run, run.values[this.name].findLast((value) => value !== null)]);
      this.value.replaceChildren(...lasts.map(([run, last]) => h("span", { style: { color: this.app.css(run.name) } }, number(last))));
    } else if (this.plot) this.rebuild();
  }
}
