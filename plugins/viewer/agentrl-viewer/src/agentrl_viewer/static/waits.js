// Runs that sample while they train: a lane for rollout and one for training, and what each waited for in every step.

import { h, hideTip, number, seconds, showTip } from "viewer/dom";

const TALL = 56;
// Lane, prefix of its metrics, color of its work.
const LANES = [["rollout", "idle/rollout/", "--phase-rollout"], ["training", "idle/trainer/", "--phase-update_actor"]];
const CAUSES = {
  trainer: ["the trainer", "--kind-loop"], weights: ["new weights", "--phase-sync_weights"], engines: ["the engines", "--kind-queue"],
  generate: ["the slowest trajectory, generating", "--kind-generate"], reward: ["the slowest trajectory, its reward", "--kind-reward"],
  interaction: ["the slowest trajectory, its interaction", "--kind-interaction"],
  environment: ["the slowest trajectory, its environment", "--kind-environment"], other: ["the slowest trajectory, its agent loop", "--kind-other"],
};
const named = (cause) => CAUSES[cause] ?? [`the slowest trajectory, in ${cause.replace("_", " ")}`, "--kind-tools"];

// What a lane did in each of the last steps: [step, seconds of the step, [cause, seconds] for each wait].
export function waits(series, prefix) {
  const causes = Object.keys(series.values).filter((name) => name.startsWith(prefix));
  return series.steps.map((step, i) => {
    const value = (name) => series.values[name]?.[i] ?? 0;
    const found = causes.map((name) => [name.slice(prefix.length), value(name)]).filter(([, length]) => length > 0);
    const whole = ["step", "validation", "checkpoint"].reduce((sum, phase) => sum + value(`timing/${phase}`), 0);
    // Between two steps passes time that belongs to no phase.
    return [step, Math.max(whole, found.reduce((sum, [, length]) => sum + length, 0)), found];
  }).filter(([step, whole]) => step > 0 && whole > 0).slice(-200);
}

export function waitsPanel(series, place, go) {
  if (!Object.keys(series.values).some((name) => name.startsWith("idle/"))) return null;
  const lanes = LANES.map(([name, prefix, fill]) => ({ name, fill, steps: waits(series, prefix) }));
  const key = (text, fill) => h("span", { class: "key" }, h("i", { style: { background: `var(${fill})` } }), text);
  const column = (lane, [step, whole, found]) => {
    const waited = found.reduce((sum, [, length]) => sum + length, 0);
    const part = (length, fill) => h("i", { style: { height: `${(TALL * length) / whole}px`, background: `var(${fill})` } });
    return h("button", { class: `stack${place?.step === step ? " here" : ""}`, onclick: () => go({ split: "train", step }),
      "aria-label": `${lane.name}, step ${step}, waited ${number((100 * waited) / whole, 0)}%`,
      onpointermove: (event) => showTip(event, `${lane.name}, step ${step}`, [["at work", seconds(whole - waited)],
        ...found.map(([cause, length]) => [`for ${named(cause)[0]}`, seconds(length)])]) },
    part(whole - waited, lane.fill), found.map(([cause, length]) => part(length, named(cause)[1])));
  };
  return h("section", { class: "panel waits" }, h("h3", {}, "Rollout and training at the same time"), lanes.map((lane) => {
    const causes = [...new Set(lane.steps.flatMap(([, , found]) => found.map(([cause]) => cause)))];
    return [h("div", { class: "legend" }, h("b", {}, lane.name), key("at work", lane.fill),
      causes.map((cause) => key(`waits for ${named(cause)[0]}`, named(cause)[1]))),
    h("div", { class: "stacks lane-of-steps", role: "group", "aria-label": lane.name, onpointerleave: hideTip }, lane.steps.map((step) => column(lane, step)))];
  }));
}
