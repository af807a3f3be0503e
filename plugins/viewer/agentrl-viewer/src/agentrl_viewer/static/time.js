// Where a step's time went: its phases, the requests in flight, and a lane for each trajectory.

import { get, timelineSteps } from "viewer/data";
import { color, h, hideTip, number, plural, rewardBadge, seconds, showTip } from "viewer/dom";
import { at } from "viewer/list";

export const KINDS = ["generate", "tools", "interaction", "environment", "reward"];
const PHASES = [
  "rollout", "score", "baseline", "sleep", "log_probs", "values", "advantages", "update_critic", "update_actor", "sync_weights",
  "validation", "checkpoint",
];

// The spans of one trajectory as a bar.
export function lane(spans) {
  const start = Math.min(...spans.map(([, at_]) => at_));
  const end = Math.max(...spans.map(([, at_, length]) => at_ + length));
  const share = (value) => `${(100 * value) / Math.max(end - start, 1e-9)}%`;
  return h("div", { class: "lane", onpointerleave: hideTip }, spans.map(([kind, at_, length]) => h("i", {
    style: { left: share(at_ - start), width: share(length), background: `var(--kind-${KINDS.includes(kind) ? kind : "other"})` },
    onpointermove: (event) => showTip(event, kind, [["from", seconds(at_ - start)], ["for", seconds(length)]]) })));
}

function phasesOf(timing) {
  const known = PHASES.map((name) => [name, timing[`timing/${name}`] ?? 0]).filter(([, value]) => value > 0);
  return known;
}

function bar(phases, total) {
  return h("div", { class: "phases", onpointerleave: hideTip }, phases.map(([name, value]) => h("i", {
    style: { "flex-grow": value, background: `var(--phase-${name})` },
    onpointermove: (event) => showTip(event, name, [["seconds", seconds(value)], ["share", `${number((100 * value) / total, 1)}%`]]) },
  value / total > 0.08 ? name : "")));
}

// How many requests are under way, as [time, count] wherever that changes.
function inFlight(spans) {
  const edges = spans.filter(([kind]) => kind === "generate").flatMap(([, at_, length]) => [[at_, 1], [at_ + length, -1]]);
  edges.sort((a, b) => a[0] - b[0]);
  let count = 0;
  return edges.map(([at_, change]) => [at_, (count += change)]);
}

export async function time(view, app, query) {
  const run = app.runs.some((each) => each.name === query.run) ? query.run : app.runs[0].name;
  const series = await get("series", { run });
  const facets = await get("facets", { run });
  const held = timelineSteps(run);
  const places = facets.steps.filter((each) => !held || held.includes(`${each.split}/${each.step}`));
  const place = places.find((each) => each.split === (query.split ?? "train") && each.step === +query.step)
    ?? places.findLast((each) => each.split === "train") ?? places.at(-1);
  const go = (next) => app.go("#/time?" + new URLSearchParams({ run, split: place?.split ?? "train", step: place?.step ?? 0, ...next }));
  const select = (label, options, onchange) => h("label", { class: "field inline" }, h("span", {}, label),
    h("select", { onchange: (event) => onchange(event.target.value) }, options.map(([value, text, selected]) => h("option", { value, selected }, text))));
  const controls = h("div", { class: "controls" },
    app.runs.length > 1 && select("run", app.runs.map((each) => [each.name, each.name, each.name === run]), (value) => app.go("#/time?" + new URLSearchParams({ run: value }))),
    select("step", places.map((each) => [`${each.split} ${each.step}`, `${each.split} ${each.step}`, each === place]), (value) => {
      const [split, step] = value.split(" ");
      go({ split, step });
    }),
    h("div", { class: "legend" }, KINDS.map((kind) => h("span", { class: "key" }, h("i", { style: { background: `var(--kind-${kind})` } }), kind)),
      h("span", { class: "key" }, h("i", { style: { background: "var(--line)" } }), "in its loop, or waiting")));
  const rows = series.steps.map((step, i) => [step, Object.fromEntries(Object.entries(series.values).filter(([name]) => name.startsWith("timing/")).map(([name, values]) => [name, values[i] ?? 0]))]);
  view.replaceChildren(controls, overTime(rows, place, go));
  if (!place) return {};
  const found = await get("timeline", { run, split: place.split, step: place.step });
  view.append(stepPanel(found, place), await lanesPanel(found, run, place, app));
  return { close: hideTip, keys: { j: () => shift(1), k: () => shift(-1) } };

  function shift(by) {
    const next = places[places.indexOf(place) + by];
    if (next) go({ split: next.split, step: next.step });
  }
}

// Seconds without a request in flight, by what was under way instead.
function idleByCause(spans) {
  const edges = spans.flatMap(([kind, at_, length]) => [[at_, kind, 1], [at_ + length, kind, -1]]).sort((a, b) => a[0] - b[0]);
  const running = {};
  const idle = {};
  edges.forEach(([at_, kind, change], i) => {
    running[kind] = (running[kind] ?? 0) + change;
    if (running.generate > 0 || i + 1 === edges.length) return;
    const cause = KINDS.find((each) => running[each] > 0) ?? "agent loops";
    idle[cause] = (idle[cause] ?? 0) + edges[i + 1][0] - at_;
  });
  return Object.entries(idle).filter(([, value]) => value > 0);
}

function overTime(rows, place, go) {
  const shown = rows.filter(([, timing]) => phasesOf(timing).length).slice(-200);
  const tallest = Math.max(...shown.map(([, timing]) => phasesOf(timing).reduce((sum, [, value]) => sum + value, 0)), 1e-9);
  const used = PHASES.filter((name) => shown.some(([, timing]) => timing[`timing/${name}`] > 0));
  return h("section", { class: "panel" }, h("h3", {}, "Seconds of each step"),
    h("div", { class: "legend" }, used.map((name) => h("span", { class: "key" }, h("i", { style: { background: `var(--phase-${name})` } }), name))),
    h("div", { class: "stacks", onpointerleave: hideTip }, shown.map(([step, timing]) => {
      const phases = phasesOf(timing);
      const total = phases.reduce((sum, [, value]) => sum + value, 0);
      return h("button", { class: `stack${place?.step === step ? " here" : ""}`, "aria-label": `step ${step}, ${seconds(total)}`, onclick: () => go({ split: step ? "train" : "validation", step }),
        onpointermove: (event) => showTip(event, `step ${step}`, [...phases.map(([name, value]) => [name, seconds(value)]), ["together", seconds(total)]]) },
      phases.map(([name, value]) => h("i", { style: { height: `${(130 * value) / tallest}px`, background: `var(--phase-${name})` } })));
    })));
}

function stepPanel(found, place) {
  const phases = phasesOf(found.timing);
  const total = phases.reduce((sum, [, value]) => sum + value, 0);
  const generate = found.spans.filter(([kind]) => kind === "generate");
  const counts = inFlight(found.spans);
  const facts = [];
  if (counts.length) {
    const start = counts[0][0];
    const end = counts.at(-1)[0];
    const area = counts.slice(0, -1).reduce((sum, [at_, count], i) => sum + count * (counts[i + 1][0] - at_), 0);
    const idle = idleByCause(found.spans);
    const causes = idle.map(([cause, value]) => `${cause} ${seconds(value)}`).join(", ");
    facts.push(["requests", generate.length], ["in flight on average", number(area / Math.max(end - start, 1e-9), 1)],
      ["no request in flight", causes ? `during ${causes}` : "never"]);
    if (total) facts.push(["outside of the rollout", `${number(100 * Math.max(0, 1 - (end - start) / total), 1)}% of the step`]);
  }
  return h("section", { class: "panel" }, h("h3", {}, `${place.split} step ${place.step}: where the time went`),
    total > 0 ? bar(phases, total) : h("p", { class: "dim" }, "No phases are recorded for it."),
    h("dl", { class: "facts-line" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))));
}

async function lanesPanel(found, run, place, app) {
  const lanes = found.lanes.filter((each) => each.spans.length);
  if (!lanes.length) return h("p", { class: "empty" }, "No times of trajectories are recorded: the run is from an older agentrl.");
  const all = lanes.flatMap((each) => each.spans);
  const start = all.reduce((least, [, at_]) => Math.min(least, at_), Infinity);
  const end = all.reduce((most, [, at_, length]) => Math.max(most, at_ + length), -Infinity);
  const canvas = h("canvas", { class: "lanes", tabindex: 0, "aria-label": "Times of trajectories" });
  const LANE = lanes.length > 120 ? 6 : 12;
  const HEAD = 74;
  const counts = inFlight(found.spans);

  function draw() {
    const width = canvas.parentElement?.clientWidth || 800;
    const height = HEAD + lanes.length * LANE + 4;
    const ratio = devicePixelRatio;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui";
    const x = (at_) => ((at_ - start) / Math.max(end - start, 1e-9)) * width;
    const most = Math.max(...counts.map(([, count]) => count), 1);
    context.fillStyle = color("--kind-generate");
    context.globalAlpha = 0.35;
    context.beginPath();
    context.moveTo(x(start), 66);
    counts.forEach(([at_, count], i) => {
      context.lineTo(x(at_), 66 - ((counts[i - 1]?.[1] ?? 0) / most) * 44);
      context.lineTo(x(at_), 66 - (count / most) * 44);
    });
    context.lineTo(x(counts.at(-1)?.[0] ?? start), 66);
    context.fill();
    context.globalAlpha = 1;
    context.fillStyle = color("--dim");
    context.fillText(`requests in flight, at most ${most}`, 4, 14);
    const label = seconds(end - start);
    context.fillText(label, width - context.measureText(label).width - 4, 14);
    lanes.forEach((each, i) => {
      const y = HEAD + i * LANE;
      const first = Math.min(...each.spans.map(([, at_]) => at_));
      const last = Math.max(...each.spans.map(([, at_, length]) => at_ + length));
      context.fillStyle = color("--line");
      context.fillRect(x(first), y + 1, Math.max(x(last) - x(first), 1), LANE - 2);
      for (const [kind, at_, length] of each.spans) {
        context.fillStyle = color(`--kind-${KINDS.includes(kind) ? kind : "other"}`);
        context.fillRect(x(at_), y + 1, Math.max((length / Math.max(end - start, 1e-9)) * width, 0.75), LANE - 2);
      }
    });
  }
  const under = (event) => lanes[Math.floor((event.offsetY - HEAD) / LANE)];
  canvas.addEventListener("pointermove", (event) => {
    const each = under(event);
    if (!each) return hideTip();
    showTip(event, each.id, [["reward", number(each.reward, 2)], ["ended", each.termination],
      ...Object.entries(each.timings).map(([name, value]) => [name, seconds(value)])]);
  });
  canvas.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const each = under(event);
    if (each) app.go(at(run, { ...place, line: each.line }));
  });
  const panel = h("section", { class: "panel" }, h("h3", {}, `${plural(lanes.length, "lane")}, the longest first`,
    found.left_out ? h("small", { class: "dim" }, `  ${found.left_out} shorter ones left out`) : ""), h("div", { class: "lanes-box" }, canvas));
  const slowest = lanes.slice(0, 3).map((each) => h("a", { class: "mini", href: at(run, { ...place, line: each.line }) }, seconds(each.timings.total), rewardBadge(each.reward)));
  panel.append(h("div", { class: "minis" }, h("span", { class: "dim" }, "slowest"), slowest));
  requestAnimationFrame(draw);
  new ResizeObserver(draw).observe(panel);
  addEventListener("themechange", draw);
  return panel;
}
