// Where a step's time went: its phases, what the engines did, and a lane for each replica and trajectory.

import { PHASES, byReplica, extent, colorName, replicaSeconds } from "viewer/clock";
import { get, timelineSteps } from "viewer/data";
import { h, hideTip, number, seconds, showTip } from "viewer/dom";
import { lanesPanel, niceStep } from "viewer/lanes";
import { waitsPanel } from "viewer/waits";

const TALLEST = 130;

// The spans of one trajectory as a bar.
export function lane(spans) {
  const start = Math.min(...spans.map(([, at_]) => at_));
  const end = Math.max(...spans.map(([, at_, length]) => at_ + length));
  const share = (value) => `${(100 * value) / Math.max(end - start, 1e-9)}%`;
  return h("div", { class: "lane", onpointerleave: hideTip }, spans.map(([kind, at_, length]) => h("i", {
    style: { left: share(at_ - start), width: share(length), background: `var(${colorName(kind)})` },
    onpointermove: (event) => showTip(event, kind, [["from", seconds(at_ - start)], ["for", seconds(length)]]) })));
}

function phasesOf(timing) {
  const known = PHASES.map((name) => [name, timing[`timing/${name}`] ?? 0]).filter(([, value]) => value > 0);
  return known;
}

// Shares of a whole, as [name, seconds].
function bar(parts) {
  const total = parts.reduce((sum, [, value]) => sum + value, 0);
  return h("div", { class: "phases", onpointerleave: hideTip }, parts.map(([name, value]) => h("i", {
    style: { "flex-grow": value, background: `var(${colorName(name)})` },
    onpointermove: (event) => showTip(event, name, [["seconds", seconds(value)], ["share", `${number((100 * value) / total, 1)}%`]]) },
  value / total > 0.015 + 0.0065 * name.length ? name : "")));
}

export async function time(view, app, query) {
  const run = app.runs.some((each) => each.name === query.run) ? query.run : app.runs[0].name;
  const series = await get("series", { run });
  const facets = await get("facets", { run });
  const held = timelineSteps(run);
  const places = facets.steps.filter((each) => !held || held.includes(`${each.split}/${each.step}`));
  const place = places.find((each) => each.split === (query.split ?? "train") && each.step === +query.step)
    ?? places.findLast((each) => each.split === "train") ?? places.at(-1);
  const go = (next) => app.go("#/time?" + new URLSearchParams({ run, split: place?.split ?? "train", step: place?.step ?? 0, zoom: query.zoom ?? "", ...next }));
  const select = (label, options, onchange) => h("label", { class: "field inline" }, h("span", {}, label),
    h("select", { onchange: (event) => onchange(event.target.value) }, options.map(([value, text, selected]) => h("option", { value, selected }, text))));
  const controls = h("div", { class: "controls" },
    app.runs.length > 1 && select("run", app.runs.map((each) => [each.name, each.name, each.name === run]), (value) => app.go("#/time?" + new URLSearchParams({ run: value }))),
    select("step", places.map((each) => [`${each.split} ${each.step}`, `${each.split} ${each.step}`, each === place]), (value) => {
      const [split, step] = value.split(" ");
      go({ split, step });
    }));
  const rows = series.steps.map((step, i) => [step, Object.fromEntries(Object.entries(series.values).filter(([name]) => name.startsWith("timing/")).map(([name, values]) => [name, values[i] ?? 0]))]);
  view.replaceChildren(...[controls, overTime(rows, place, go), waitsPanel(series, place, go)].filter(Boolean));
  for (const stacks of view.querySelectorAll(".stacks")) {
    stacks.scrollLeft = (stacks.querySelector(".here")?.offsetLeft ?? stacks.scrollWidth) - stacks.clientWidth / 2;
  }
  if (!place) return {};
  const found = await get("timeline", { run, split: place.split, step: place.step });
  view.append(stepPanel(found, place), lanesPanel(found, place, app, run, query.zoom, go));
  return { close: hideTip, keys: { j: () => shift(1), k: () => shift(-1) } };

  function shift(by) {
    const next = places[places.indexOf(place) + by];
    if (next) go({ split: next.split, step: next.step });
  }
}

function overTime(rows, place, go) {
  const shown = rows.filter(([, timing]) => phasesOf(timing).length).slice(-200);
  const tallest = Math.max(...shown.map(([, timing]) => phasesOf(timing).reduce((sum, [, value]) => sum + value, 0)), 1e-9);
  const used = PHASES.filter((name) => shown.some(([, timing]) => timing[`timing/${name}`] > 0));
  const tick = niceStep(tallest / 4);
  const ticks = Array.from({ length: Math.floor((1.08 * tallest) / tick) + 1 }, (_, i) => i * tick);
  const every = Math.ceil(shown.length / 10);
  return h("section", { class: "panel" }, h("h3", {}, "Seconds of each step"),
    h("div", { class: "legend" }, used.map((name) => h("span", { class: "key" }, h("i", { style: { background: `var(--phase-${name})` } }), name))),
    h("div", { class: "stacks", style: { "--tick": `${(TALLEST * tick) / tallest}px` }, onpointerleave: hideTip },
      h("div", { class: "scale" }, ticks.map((at) => h("small", { style: { bottom: `${(TALLEST * at) / tallest}px` } }, at ? seconds(at) : "0"))),
      shown.map(([step, timing], i) => {
      const phases = phasesOf(timing);
      const total = phases.reduce((sum, [, value]) => sum + value, 0);
      return h("button", { class: `stack${place?.step === step ? " here" : ""}`, "aria-label": `step ${step}, ${seconds(total)}`, onclick: () => go({ split: step ? "train" : "validation", step }),
        onpointermove: (event) => showTip(event, `step ${step}`, [...phases.map(([name, value]) => [name, seconds(value)]), ["together", seconds(total)]]) },
      phases.map(([name, value]) => h("i", { style: { height: `${(TALLEST * value) / tallest}px`, background: `var(--phase-${name})` } })),
      (shown.length - 1 - i) % every === 0 && h("small", {}, step));
      })));
}

function stepPanel(found, place) {
  const phases = phasesOf(found.timing);
  const total = phases.reduce((sum, [, value]) => sum + value, 0);
  const requests = found.spans.filter(([kind]) => kind === "generate");
  const panel = h("section", { class: "panel" }, h("h3", {}, `${place.split} step ${place.step}: where the time went`),
    total > 0 ? bar(phases) : h("p", { class: "dim" }, "No phases are recorded for it."));
  if (!requests.length) return panel;
  const replicas = byReplica([...requests, ...found.others.filter(([kind]) => kind === "generate")]);
  const spans = [...found.spans, ...found.others];
  const used = replicaSeconds(replicas, [found.spans, found.others], found.phases, extent(found.phases, spans));
  const whole = used.reduce((sum, [, value]) => sum + value, 0);
  const share = (value) => `${number((100 * value) / whole, 0)}%`;
  const queued = requests.reduce((sum, [, , , , wait]) => sum + (wait ?? 0), 0);
  const [start, end] = extent([], requests);
  const served = requests.reduce((sum, [, , length]) => sum + length, 0);
  const facts = [["requests", requests.length], ["in flight on average", number(served / Math.max(end - start, 1e-9), 1)],
    ...(found.known ? [["wait in the engine", `${seconds(queued / requests.length)} per request`]] : []),
    [found.phases.length ? "engines busy" : "engines busy in the rollout", share(used.find(([name]) => name === "generate")?.[1] ?? 0)],
    ["idle", used.filter(([name, value]) => name !== "generate" && value / whole > 0.005).map(([name, value]) => `${name} ${share(value)}`).join(", ") || "never"]];
  panel.append(h("h4", {}, found.known ? `Time of ${replicas.length === 1 ? "the engine replica" : `${replicas.length} engine replicas`}` : "Time of the engines"), bar(used),
    h("dl", { class: "facts-line" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
  return panel;
}
