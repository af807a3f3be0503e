// The clock of a step: its phases, a lane for each engine replica, a lane for each trajectory.

import { KINDS, byReplica, counts, extent, colorName } from "viewer/clock";
import { color, h, hideTip, number, plural, rewardBadge, seconds, showTip } from "viewer/dom";
import { at as addressOf } from "viewer/list";

const GUTTER = 84;
const AXIS = 20;
const PHASE = 22;
const MAX_REPLICAS = 32;

export function lanesPanel(found, place, app, run, zoom, go) {
  const lanes = found.lanes.filter((each) => each.spans.length);
  if (!lanes.length) return h("p", { class: "empty" }, "No times of trajectories are recorded: the run is from an older agentrl.");
  const phases = found.phases ?? [];
  const rollouts = phases.filter(([name]) => name === (place.split === "train" ? "rollout" : "validation"));
  const close = zoom === "rollout" && rollouts.length > 0;
  const [start, end] = close ? extent(rollouts, found.spans) : extent(phases, [...found.spans, ...found.others]);
  const replicas = byReplica([...found.spans, ...found.others].filter(([kind]) => kind === "generate"));
  const shown = replicas.slice(0, MAX_REPLICAS).map(([key, requests]) => ({ key, counts: counts(requests) }));
  const most = Math.max(1, ...shown.flatMap((each) => each.counts.map(([, running, waiting]) => running + waiting)));
  const weights = phases.filter(([name]) => name === "sync_weights");
  const TALL = shown.length > 8 ? 14 : shown.length > 3 ? 22 : 34;
  const LANE = lanes.length > 120 ? 6 : 12;
  const phasesTop = AXIS;
  const replicasTop = AXIS + (phases.length ? PHASE + 8 : 0);
  const headHeight = replicasTop + shown.length * (TALL + 4) + 6;
  const head = h("canvas", { class: "lanes clock", role: "img", "aria-label": `Phases and ${plural(shown.length, "engine replica")} on the clock` });
  const canvas = h("canvas", { class: "lanes", tabindex: 0, "aria-label": "Times of trajectories" });
  let width = 800;

  const x = (at) => GUTTER + ((at - start) / Math.max(end - start, 1e-9)) * (width - GUTTER);
  const timeAt = (offset) => start + ((offset - GUTTER) / Math.max(width - GUTTER, 1)) * (end - start);

  function begin(target, height) {
    const ratio = devicePixelRatio;
    target.width = width * ratio;
    target.height = height * ratio;
    target.style.height = `${height}px`;
    const context = target.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    return context;
  }

  // Edges between pixels would show as seams.
  const sharp = (value) => Math.round(value * devicePixelRatio) / devicePixelRatio;

  // A part of the time line, cut to what is shown and at least as wide as can be seen.
  function block(context, at, length, y, height, fill) {
    const [from, to] = [Math.max(at, start), Math.min(at + length, end)];
    if (to < from) return 0;
    const left = sharp(x(from));
    const wide = Math.max(sharp(x(to)) - left, 0.75);
    context.fillStyle = fill;
    context.fillRect(left, y, wide, height);
    return wide;
  }

  function grid(context, height, labels) {
    const step = niceStep((end - start) / Math.max(2, Math.floor((width - GUTTER) / 90)));
    for (let at = 0; at <= end - start; at += step) {
      context.fillStyle = color("--line");
      context.fillRect(Math.round(x(start + at)), labels ? AXIS - 5 : 0, 1, height);
      if (!labels) continue;
      const text = at ? seconds(at) : "0";
      context.fillStyle = color("--dim");
      context.fillText(text, Math.min(x(start + at) + 3, width - context.measureText(text).width), 8);
    }
  }

  function drawHead() {
    const context = begin(head, headHeight);
    grid(context, headHeight, true);
    const dim = color("--dim");
    const label = (text, y) => {
      context.fillStyle = dim;
      context.fillText(text, 0, y);
    };
    if (phases.length) label("phases", phasesTop + PHASE / 2);
    for (const [name, at, length] of phases) {
      const fill = color(colorName(name));
      const wide = block(context, at, length, phasesTop, PHASE, fill);
      if (wide < context.measureText(name).width + 10) continue;
      context.fillStyle = readableOn(fill);
      context.fillText(name, Math.max(x(at), GUTTER) + (wide - context.measureText(name).width) / 2, phasesTop + PHASE / 2);
    }
    shown.forEach((each, i) => {
      const y = replicasTop + i * (TALL + 4);
      context.fillStyle = color("--raised");
      context.fillRect(GUTTER, y, width - GUTTER, TALL);
      label(each.key === "" ? "all engines" : `replica ${each.key}`, y + TALL / 2 - (TALL > 30 ? 7 : 0));
      if (TALL > 30) label(`most: ${Math.max(0, ...each.counts.map(([, running, waiting]) => running + waiting))}`, y + TALL / 2 + 8);
      const row = (count) => (count / most) * (TALL - 2);
      each.counts.forEach(([at, running, waiting], k) => {
        const until = each.counts[k + 1]?.[0] ?? at;
        if (until <= at) return;
        if (running) block(context, at, until - at, y + TALL - row(running), row(running), color("--kind-generate"));
        if (waiting) block(context, at, until - at, y + TALL - row(running + waiting), row(waiting), color("--kind-queue"));
      });
      for (const [, at, length] of weights) block(context, at, length, y, TALL, color("--phase-sync_weights"));
    });
  }

  function drawLanes() {
    const height = lanes.length * LANE + 4;
    const context = begin(canvas, height);
    grid(context, height, false);
    context.fillStyle = color("--dim");
    context.fillText("trajectories", 0, LANE / 2 + 2);
    lanes.forEach((each, i) => {
      const y = i * LANE;
      const [first, last] = extent([], each.spans);
      block(context, first, last - first, y + 1, LANE - 2, color("--kind-loop"));
      for (const [kind, at, length, , queued] of each.spans) {
        block(context, at, length, y + 1, LANE - 2, color(colorName(kind)));
        if (queued) block(context, at, Math.min(queued, length), y + 1, LANE - 2, color("--kind-queue"));
      }
    });
  }

  function draw() {
    width = canvas.parentElement?.clientWidth || 800;
    drawHead();
    drawLanes();
  }

  head.addEventListener("pointermove", (event) => {
    const at = timeAt(event.offsetX);
    const within = ([, begun, length]) => begun <= at && at <= begun + length;
    if (event.offsetX < GUTTER) return hideTip();
    if (event.offsetY < replicasTop) {
      // The last one is within the others.
      const phase = phases.findLast(within);
      if (!phase) return hideTip();
      return showTip(event, phase[0], [["from", seconds(phase[1] - start)], ["for", seconds(phase[2])]]);
    }
    const each = shown[Math.floor((event.offsetY - replicasTop) / (TALL + 4))];
    if (!each) return hideTip();
    const [, running, waiting] = each.counts.findLast(([begun]) => begun <= at) ?? [0, 0, 0];
    showTip(event, each.key === "" ? "all engines" : `replica ${each.key}`, [["at", seconds(at - start)], ["served", running], ["waiting", waiting],
      ["phase", phases.find(within)?.[0] ?? "–"]]);
  });
  const under = (event) => lanes[Math.floor(event.offsetY / LANE)];
  canvas.addEventListener("pointermove", (event) => {
    const each = under(event);
    if (!each) return hideTip();
    const at = timeAt(event.offsetX);
    const span = each.spans.find(([, begun, length]) => begun <= at && at <= begun + length);
    const here = span ? [[span[0], seconds(span[2])], ...(span[3] >= 0 ? [["replica", span[3]], ["queue", seconds(span[4])]] : [])] : [];
    showTip(event, each.id, [...here, ["reward", number(each.reward, 2)], ["ended", each.termination],
      ...Object.entries(each.timings).map(([name, value]) => [`all ${name}`, seconds(value)])]);
  });
  for (const each of [head, canvas]) each.addEventListener("pointerleave", hideTip);
  canvas.addEventListener("click", (event) => {
    const each = under(event);
    if (each) app.go(addressOf(run, { ...place, line: each.line }));
  });
  const range = rollouts.length > 0 && h("span", { class: "switch" }, [["", "whole step"], ["rollout", place.split === "train" ? "rollout" : "validation"]].map(([value, text]) =>
    h("button", { "aria-pressed": String((close ? "rollout" : "") === value), onclick: () => go({ zoom: value }) }, text)));
  const left = [found.left_out && `${found.left_out} shorter trajectories`, replicas.length > MAX_REPLICAS && `${replicas.length - MAX_REPLICAS} replicas`].filter(Boolean);
  const kinds = KINDS.filter((kind) => (kind === "queue" ? lanes.some((each) => each.spans.some((span) => span[4] > 0)) : lanes.some((each) => each.spans.some(([name]) => name === kind))));
  const key = (name, text) => h("span", { class: "key" }, h("i", { style: { background: `var(${name})` } }), text);
  const panel = h("section", { class: "panel" },
    h("div", { class: "panel-head" }, h("h3", {}, "On the clock", left.length ? h("small", { class: "dim" }, `  without ${left.join(" and ")}`) : ""), range,
      h("div", { class: "legend" }, kinds.map((kind) => key(`--kind-${kind}`, kind)), weights.length > 0 && key("--phase-sync_weights", "weights"),
        key("--kind-loop", "in its loop, or waiting"))),
    h("div", { class: "lanes-box" }, head, canvas));
  const slowest = lanes.slice(0, 3).map((each) => h("a", { class: "mini", href: addressOf(run, { ...place, line: each.line }) }, seconds(each.timings.total), rewardBadge(each.reward)));
  panel.append(h("div", { class: "minis" }, h("span", { class: "dim" }, "slowest"), slowest));
  requestAnimationFrame(draw);
  new ResizeObserver(draw).observe(panel);
  addEventListener("themechange", draw);
  return panel;
}

// 1, 2 or 5 times a power of ten, not below the given length.
export function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-9)));
  return power * ([1, 2, 5].find((each) => each * power >= least) ?? 10);
}

function readableOn(fill) {
  const [red, green, blue] = [1, 3, 5].map((place) => parseInt(fill.slice(place, place + 2), 16));
  return 0.3 * red + 0.59 * green + 0.11 * blue > 165 ? "#1c2330" : "#ffffff";
}
