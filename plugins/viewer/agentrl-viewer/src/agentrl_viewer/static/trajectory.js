// One trajectory: chat, tokens, rewards, branches, times; and several of them side by side.

import { colorName } from "viewer/clock";
import { get, holds, imageAt } from "viewer/data";
import { h, hideTip, number, plural, rewardBadge, seconds, showTip, signed, svg, terminationBadge } from "viewer/dom";
import { at } from "viewer/list";
import { lane } from "viewer/time";

const kept = { tab: "chat", by: "log_prob", prompt: false };

// Chat -----------------------------------------------------------------------------------------------------------

const IMAGE = /^([0-9a-f]{32})-(\d{1,6})x(\d{1,6})\.(png|jpeg)$/;
const nameOf = (part) => (part?.type === "image" && IMAGE.test(part.image) ? part.image : null);

function label(name) {
  const [, hash, width, height] = IMAGE.exec(name);
  return `<image ${hash.slice(0, 4)}… ${width}x${height}>`;
}

const textOf = (part) => (nameOf(part) ? label(part.image) : part?.text ?? JSON.stringify(part));
const asText = (content) => (typeof content === "string" ? content
  : Array.isArray(content) ? content.map(textOf).join("") : content == null ? "" : JSON.stringify(content));
const hasImages = (content) => Array.isArray(content) && content.some(nameOf);

// A content as it was shown: texts, and images in their places.
const shown = (content, run) => (hasImages(content) ? content.map((part) => (nameOf(part) ? picture(part.image, run) : textOf(part))) : asText(content));

function picture(name, run) {
  const named = h("span", { class: "dim" }, label(name));
  const source = imageAt(run, name);
  if (!source) return named;
  const [, , width, height] = IMAGE.exec(name);
  return h("img", { class: "image", src: source, alt: label(name), title: label(name), width, height, onerror: (event) => event.target.replaceWith(named) });
}

function callName(call) {
  const given = call.function ?? call;
  const values = typeof given.arguments === "string" ? given.arguments
    : Object.entries(given.arguments ?? {}).map(([name, value]) => `${name}=${JSON.stringify(value)}`).join(", ");
  return { name: String(given.name ?? "?"), values, whole: typeof given.arguments === "string" ? given.arguments : JSON.stringify(given.arguments, null, 2) };
}

function turnRewards(row, turn) {
  const parts = [];
  if (row.turn_rewards?.[turn]) parts.push(["turn", row.turn_rewards[turn]]);
  (row.tool_rewards ?? []).forEach((value, i) => {
    if (row.tool_reward_turns?.[i] === turn) parts.push([row.tool_reward_names?.[i] ?? "tool", value]);
  });
  (row.turn_scores ?? []).forEach((value, i) => {
    if (row.turn_score_turns?.[i] === turn && value !== row.turn_rewards?.[turn]) parts.push(["score", value]);
  });
  return parts;
}

export function chat(row, run) {
  const messages = [...(row.messages ?? [])];
  const executed = [...(row.tool_calls ?? [])];
  const box = h("div", { class: "chat" });
  let turn = -1;
  for (let i = 0; i < messages.length; i++) {
    const message = messages[i];
    const role = String(message.role);
    if (role === "tool" && messages[i].shown) continue;
    const bubble = h("article", { class: `message ${["user", "assistant", "system", "tool"].includes(role) ? role : "other"}` },
      h("header", {}, role));
    if (role === "assistant") {
      turn++;
      bubble.firstChild.append(h("small", {}, `turn ${turn + 1}`));
      for (const [name, value] of turnRewards(row, turn)) {
        bubble.firstChild.append(h("span", { class: `badge ${value > 0 ? "good" : value < 0 ? "bad" : ""}` }, `${name} ${signed(value, 2)}`));
      }
    }
    const reasoning = asText(message.reasoning_content ?? message.reasoning);
    if (reasoning) bubble.append(h("details", { class: "reasoning" }, h("summary", {}, "reasoning"), h("pre", {}, reasoning)));
    const text = asText(message.content);
    if (text || !(message.tool_calls ?? []).length) {
      const body = h("div", { class: "body" }, text ? shown(message.content, run) : h("span", { class: "dim" }, "(empty)"));
      bubble.append(role === "system" && text.length > 300 ? h("details", {}, h("summary", {}, `${text.slice(0, 100)}…`), body) : body);
    }
    // The answers to an assistant's calls follow it, in order.
    let answer = i + 1;
    for (const call of message.tool_calls ?? []) {
      const { name, values, whole } = callName(call);
      const done = executed[0]?.name === name ? executed.shift() : null;
      const content = messages[answer]?.role === "tool" ? messages[answer++].content ?? "" : done?.response;
      const reply = content === undefined ? undefined : asText(content);
      if (messages[answer - 1]?.role === "tool") messages[answer - 1] = { ...messages[answer - 1], shown: true };
      bubble.append(h("details", { class: `call${done?.failed ? " failed" : ""}`, open: hasImages(content) },
        h("summary", {}, h("code", {}, name), h("span", { class: "arguments" }, `(${values})`),
          h("span", { class: "answer" }, reply === undefined ? "no answer" : `→ ${reply.slice(0, 80)}`),
          done?.failed && h("span", { class: "badge bad" }, "failed")),
        h("h4", {}, "arguments"), h("pre", {}, whole ?? ""), h("h4", {}, "answer"), h("pre", {}, content === undefined ? "none" : shown(content, run))));
    }
    box.append(bubble);
  }
  if (!messages.length) box.append(h("p", { class: "empty" }, row.error ? "It failed before there was a message." : "No messages were recorded."));
  if (row.error) box.append(h("details", { class: "failure", open: true }, h("summary", {}, `ended with ${row.termination}`), h("pre", {}, row.error)));
  return box;
}

// Tokens ---------------------------------------------------------------------------------------------------------

function columns(row) {
  const mask = row.response_mask ?? [];
  const where = (values) => (values?.length ? mask.map((on, i) => (on ? values[i] : null)) : null);
  const engine = where(row.response_logprobs);
  const actor = where(row.old_log_probs);
  const advantage = where(row.advantages) ?? (row.advantage === null || row.advantage === undefined ? null : mask.map((on) => (on ? row.advantage : null)));
  return {
    mask, log_prob: engine, advantage,
    gap: engine && actor ? engine.map((value, i) => (value === null || value === undefined ? null : actor[i] - value)) : null,
    version: row.policy_versions?.length ? row.policy_versions.map((version) => (version < 0 ? null : version)) : null,
    turn: row.turn_ids?.length ? row.turn_ids.map((turn) => (turn < 0 ? null : turn)) : null,
  };
}

const BY = {
  mask: ["mask", "who wrote a token: the policy (mask 1, trained) or prompt, tools and template (mask 0)"],
  log_prob: ["log-prob", "log-probability under the engine: the darker, the less likely"],
  gap: ["gap", "log-probability of the actor minus that of the engine"],
  advantage: ["advantage", "green: made more likely, red: made less likely"],
  version: ["version", "which weights sampled a token"],
};
const WHY = {
  gap: "not recorded: this run trained on the engine's log-probs, so the actor computed none (algorithm.old_log_probs=actor computes them)",
  advantage: "not recorded: the trajectory was not trained",
  log_prob: "the engine gave no log-probs", version: "no versions are recorded",
};

function paint(by, value, scale) {
  if (value === null || value === undefined) return "";
  const mix = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(Math.min(1, Math.max(0, share)) * 78)}%, transparent)`;
  if (by === "mask") return value ? mix("--accent", 0.42) : "";
  if (by === "log_prob") return mix("--bad", Math.sqrt(-value / 8));
  if (by === "version") return `color-mix(in srgb, var(--run-${value % 8}) 45%, transparent)`;
  return value === 0 ? "" : mix(value > 0 ? "--good" : "--bad", 0.12 + 0.88 * (Math.abs(value) / scale));
}

function tokens(row) {
  const data = columns(row);
  const pane = h("div", { class: "tokens" });
  const legend = h("p", { class: "token-legend" });
  const buttons = h("div", { class: "switch", role: "group", "aria-label": "Colour by" });
  const body = h("div", { class: "token-text", "data-by": "" });
  const ids = row.response_ids ?? [];
  const spans = ids.map((id, i) => token(row.response_tokens?.[i], id, { "data-i": i, class: data.mask[i] ? "sampled" : "given" }));
  const prompt = h("details", { class: "prompt-tokens", open: kept.prompt, ontoggle: (event) => { kept.prompt = event.target.open; } },
    h("summary", {}, plural((row.prompt_ids ?? []).length, "prompt token")),
    (row.prompt_ids ?? []).map((id, i) => token(row.prompt_tokens?.[i], id, { class: "given" })));
  body.append(prompt, ...spans);

  function draw() {
    const values = data[kept.by];
    const known = (values ?? []).filter((value) => value !== null && value !== undefined);
    const scale = Math.max(1e-9, ...known.map(Math.abs));
    spans.forEach((span, i) => { span.style.background = paint(kept.by, values?.[i], scale); });
    buttons.replaceChildren(...Object.entries(BY).map(([by, [name, title]]) => h("button", {
      "aria-pressed": String(by === kept.by), title, "data-by": by, onclick: () => { kept.by = by; draw(); } }, name)));
    const range = known.length && kept.by !== "mask" ? `  ${number(Math.min(...known), 4)} … ${number(Math.max(...known), 4)}` : "";
    legend.replaceChildren(values && known.length ? BY[kept.by][1] + range : WHY[kept.by] ?? BY[kept.by][1]);
  }

  body.addEventListener("pointermove", (event) => {
    const i = event.target.dataset?.i;
    if (i === undefined) return hideTip();
    const log_prob = data.log_prob?.[i];
    const lines = [["id", ids[i]], ["mask", data.mask[i]]];
    if (log_prob !== null && log_prob !== undefined) lines.push(["log-prob", `${number(log_prob, 4)}  (${number(100 * Math.exp(log_prob), 1)}%)`]);
    if (data.gap && data.gap[i] !== null) lines.push(["gap to the engine", data.gap[i] === 0 ? "0" : data.gap[i].toExponential(1)]);
    if (data.advantage?.[i] != null) lines.push(["advantage", signed(data.advantage[i], 4)]);
    if (data.version?.[i] != null) lines.push(["version", data.version[i]]);
    if (data.turn?.[i] != null) lines.push(["turn", data.turn[i] + 1]);
    showTip(event, JSON.stringify(row.response_tokens?.[i] ?? `#${ids[i]}`), lines);
  });
  body.addEventListener("pointerleave", hideTip);
  pane.append(h("div", { class: "token-head" }, buttons, legend), body);
  if (!row.response_tokens) {
    pane.append(h("p", { class: "dim" }, "Ids only: neither a checkpoint of the run nor its model's folder has a tokenizer.json."));
  }
  draw();
  return pane;
}

function token(text, id, attributes) {
  const shown = text === undefined || text === null ? `${id} ` : text;
  return h("span", { ...attributes, class: `token ${attributes.class}${shown === "" ? " part" : ""}` }, shown === "" ? "·" : shown.replace(/\n/g, "↵\n"));
}

// The tree -------------------------------------------------------------------------------------------------------

// The numbers of the nodes from the first prompt to this one.
function line(nodes, leaf) {
  const found = [];
  for (let i = leaf; i !== null && i !== undefined; i = nodes[i].parent) found.unshift(i);
  return found;
}

// The parent of each row: the earlier row with which it shares most tokens.
function parents(rows, nodes) {
  const lines = rows.map((row) => line(nodes, row.leaf));
  const tokens_ = (part) => part.reduce((sum, i) => sum + nodes[i].tokens, 0);
  return lines.map((own, i) => {
    let best = { parent: -1, shared: 0 };
    for (let j = 0; j < i; j++) {
      const shared = tokens_(own.filter((node, at_) => lines[j][at_] === node));
      if (shared > best.shared) best = { parent: j, shared };
    }
    return { ...best, length: tokens_(own) };
  });
}

function branches(rows, nodes, chosen, choose) {
  const links = parents(rows, nodes);
  const width = 260;
  const longest = Math.max(...links.map((link) => link.length), 1);
  const x = (tokens_) => 6 + (tokens_ / longest) * (width - 12);
  const y = (i) => 14 + i * 24;
  const parts = links.map(({ parent, shared, length }, i) => [
    parent >= 0 && svg("path", { d: `M${x(shared)} ${y(parent)} V${y(i)}`, class: "link" }),
    svg("line", { x1: x(parent >= 0 ? shared : 0), x2: x(length), y1: y(i), y2: y(i), class: `branch${i === chosen ? " chosen" : ""}`, tabindex: 0,
      role: "button", onclick: () => choose(i), onkeydown: (event) => event.key === "Enter" && choose(i) },
    svg("title", {}, `branch ${i + 1}: ${length} tokens${parent >= 0 ? `, ${shared} shared with branch ${parent + 1}` : ""}`)),
  ]);
  return svg("svg", { viewBox: `0 0 ${width} ${rows.length * 24 + 6}`, class: "tree", role: "img" }, parts);
}

const badge = (name, value) => h("span", { class: `badge ${value > 0 ? "good" : value < 0 ? "bad" : ""}` }, `${name} ${signed(value, 2)}`);

// Branches stand side by side from their fork; each node shows what it earned and how it was trained.
function tree(found, chosen) {
  const { nodes } = found;
  const children = new Map();
  nodes.forEach((node, i) => children.set(node.parent, [...(children.get(node.parent) ?? []), i]));
  const here = new Set(line(nodes, found.rows[chosen].leaf));
  const scale = Math.max(1e-9, ...nodes.map((node) => Math.abs(node.advantage ?? 0)));

  function card(i) {
    const node = nodes[i];
    const trained = node.advantage !== null && node.advantage !== undefined;
    const rewrites = node.kind === "prompt" && node.parent !== null;
    const name = node.kind === "turn" ? `turn ${node.turn + 1}` : rewrites ? "history rewritten" : node.kind;
    return h("article", { class: `node ${node.kind}${here.has(i) ? " here" : ""}`, style: trained ? { "border-left-color": paint("advantage", node.advantage, scale) || "var(--dim)" } : {} },
      h("header", {}, h("b", {}, name), node.agent && h("span", { class: "badge" }, node.agent),
        node.policy && node.policy !== node.agent && h("span", { class: "badge" }, `policy ${node.policy}`), h("small", {}, plural(node.tokens, "token")),
        node.seconds != null && h("small", {}, seconds(node.seconds)),
        node.turn_reward ? badge("reward", node.turn_reward) : "",
        (node.rewards ?? []).map((reward) => badge(reward.name, reward.value)),
        trained ? badge("advantage", node.advantage) : node.kind === "turn" && h("small", {}, "not trained")),
      h("pre", {}, node.text || "(no text)"),
      (node.calls ?? []).map((call) => h("div", { class: `tool${call.failed ? " failed" : ""}` }, h("code", {}, `${call.name}(${JSON.stringify(call.arguments)})`),
        ` → ${String(call.response).slice(0, 160)}`, call.reward != null && badge("earned", call.reward), call.failed && h("span", { class: "badge bad" }, "failed"))));
  }
  function from(i) {
    const cards = [];
    let next = [i];
    while (next.length === 1) {
      cards.push(card(next[0]));
      next = children.get(next[0]) ?? [];
    }
    return h("div", { class: "limb" }, cards, next.length > 1 && h("div", { class: "fork" }, next.map(from)));
  }
  return h("div", { class: "nodes" }, h("div", { class: "fork" }, (children.get(null) ?? []).map(from)));
}

// Pages ----------------------------------------------------------------------------------------------------------

const panel = (title, ...content) => h("section", { class: "panel" }, h("h3", {}, title), content);

function rewards(row) {
  const weights = Object.entries({ ...row.reward_components });
  const details = Object.entries(row.reward_metrics ?? {}).filter(([name]) => !(name in (row.reward_components ?? {})));
  const line = ([name, value]) => h("tr", {}, h("th", {}, name), h("td", {}, number(value, 3)));
  const turns = Math.max(row.turn_rewards?.length ?? 0, ...(row.tool_reward_turns ?? []).map((turn) => turn + 1), ...(row.turn_score_turns ?? []).map((turn) => turn + 1), 0);
  return panel("Reward", h("table", { class: "reward-table" }, h("tbody", {},
    line(["reward", row.reward]), weights.map(line), details.map(line), row.advantage !== null && line(["advantage", row.advantage]))),
  turns > 0 && h("table", { class: "by-turn" }, h("thead", {}, h("tr", {}, h("th", {}, "turn"), h("th", {}, "earned"))), h("tbody", {},
    Array.from({ length: turns }, (_, turn) => h("tr", {}, h("th", {}, turn + 1),
      h("td", {}, turnRewards(row, turn).map(([name, value]) => `${name} ${signed(value, 3)}`).join(", ") || "–"))))),
  row.ground_truth != null && h("p", { class: "truth" }, h("span", { class: "dim" }, "ground truth "), asText(row.ground_truth)));
}

function samples(run, found) {
  const item = (row) => h(holds(run, row) ? "a" : "span", { class: `mini${row.line === found.line && row.step === found.step && row.split === found.split ? " here" : ""}`,
    href: holds(run, row) ? at(run, row) : null }, `#${row.sample}${row.branch ? `.${row.branch + 1}` : ""}`, rewardBadge(row.reward));
  const steps = new Map();
  const same = [...found.same_prompt].sort((a, b) => a.step - b.step || a.sample - b.sample || a.branch - b.branch);
  for (const row of same) steps.set(`${row.split} ${row.step}`, [...(steps.get(`${row.split} ${row.step}`) ?? []), row]);
  const base = { run, split: found.split, step: found.step };
  return [
    found.samples.length > 1 && panel(`Samples of this prompt`, h("div", { class: "minis" }, found.samples.map(item)),
      h("a", { href: "#/compare?" + new URLSearchParams({ ...base, uid: found.rows[0].uid }) }, "Side by side")),
    steps.size > 0 && panel("The same prompt in other steps", h("div", { class: "steps" }, [...steps].slice(0, 12).map(([name, rows]) =>
      h("div", {}, h("small", {}, name), rows.slice(0, 8).map(item)))),
    h("a", { href: "#/compare?" + new URLSearchParams({ ...base, prompt: found.samples[0].prompt }) }, "Compare steps")),
  ];
}

export async function trajectory(view, app, query) {
  const found = await get("trajectory", query);
  let chosen = Math.max(0, found.rows.findIndex((row) => row.line === +query.line));
  const main = h("section", { class: "main" });
  const side = h("aside", { class: "side" });
  const position = app.listPosition;

  function neighbour(by) {
    if (!position) return null;
    const index = position.index + by;
    return position.rows.get(Math.floor(index / 100))?.[index % 100] ?? null;
  }
  const go = (by) => {
    const row = neighbour(by);
    if (!row) return;
    app.listPosition = { ...position, index: position.index + by };
    app.go(at(query.run, row));
  };

  function draw() {
    const row = found.rows[chosen];
    const facts = [
      plural(row.num_turns ?? 0, "message"), `${plural((row.response_mask ?? []).reduce((sum, on) => sum + on, 0), "token")} sampled`,
      seconds(row.timings?.total), row.data_source,
    ].filter(Boolean);
    const tab = (name, label) => h("button", { role: "tab", "aria-selected": String(kept.tab === name), onclick: () => { kept.tab = name; draw(); } }, label);
    const content = { chat, tokens, record, tree: () => tree(found, chosen) }[kept.tab](row, query.run);
    main.replaceChildren(
      h("div", { class: "trail" },
        h("a", { href: "#/trajectories?" + new URLSearchParams(app.listQuery ?? { run: query.run }) }, "← Trajectories"),
        h("span", { class: "dim" }, query.run), h("b", {}, `step ${found.step}`), h("span", {}, `${found.split} · sample ${row.sample}`), rewardBadge(row.reward), terminationBadge(row.termination),
        h("span", { class: "dim facts" }, facts.join(" · "))),
      h("div", { class: "tabs", role: "tablist" }, tab("chat", "Chat"), tab("tree", "Tree"), tab("tokens", "Tokens"), tab("record", "Record"),
        h("span", { class: "steppers" }, h("button", { class: "icon", title: "Previous  k", disabled: !neighbour(-1), onclick: () => go(-1) }, "↑"),
          h("button", { class: "icon", title: "Next  j", disabled: !neighbour(1), onclick: () => go(1) }, "↓"))), content);
    side.replaceChildren(...[
      rewards(row),
      found.rows.length > 1 && panel(`Branches (${found.rows.length})`, branches(found.rows, found.nodes, chosen, (i) => { chosen = i; draw(); })),
      ...samples(query.run, found),
      panel("Time", (row.spans ?? []).length ? lane(row.spans) : "", h("table", {}, h("tbody", {}, Object.entries(row.timings ?? {}).map(([name, value]) =>
        h("tr", {}, h("th", {}, h("i", { class: "dot", style: { background: `var(${colorName(name)})` } }), name), h("td", {}, seconds(value)))))),
      h("a", { href: "#/time?" + new URLSearchParams({ run: query.run, split: found.split, step: found.step }) }, "All of this step")),
      (row.tool_schemas ?? []).length > 0 && panel("Tools", row.tool_schemas.map((schema) => h("details", { class: "schema" },
        h("summary", {}, h("code", {}, String((schema.function ?? schema).name))), h("pre", {}, JSON.stringify(schema.function ?? schema, null, 2))))),
    ].filter(Boolean));
  }
  view.replaceChildren(h("div", { class: "columns trajectory" }, main, side));
  draw();
  const tabs = ["chat", "tree", "tokens", "record"];
  return {
    keys: {
      j: () => go(1), k: () => go(-1), Escape: () => app.go("#/trajectories?" + new URLSearchParams(app.listQuery ?? { run: query.run })),
      t: () => { kept.tab = tabs[(tabs.indexOf(kept.tab) + 1) % tabs.length]; draw(); },
    },
    close: hideTip,
  };
}

function record(row) {
  const { prompt_tokens, response_tokens, ...rest } = row;
  return h("pre", { class: "record" }, JSON.stringify(rest, (_, value) => (Array.isArray(value) && value.length && value.every((each) => typeof each === "number")
    ? `[${value.join(", ")}]` : value), 2));
}

export async function compare(view, app, query) {
  const filter = query.uid ? { split: query.split, first_step: query.step, last_step: query.step, uid: query.uid } : { prompt: query.prompt };
  const { rows } = await get("list", { run: query.run, ...filter, order: "oldest", offset: 0, limit: 64 });
  rows.sort((a, b) => a.step - b.step || a.sample - b.sample || a.branch - b.branch);
  const groups = new Map();
  for (const row of rows) {
    const name = query.uid ? `sample ${row.sample}${row.branch ? `, branch ${row.branch + 1}` : ""}` : `${row.split} step ${row.step}`;
    groups.set(name, [...(groups.get(name) ?? []), row]);
  }
  const names = [...groups.keys()];
  // Of many steps, the first and the last say most.
  const shown = new Set(query.uid ? names.slice(0, 8) : [names[0], names.at(-1)]);
  const columns_ = h("div", { class: "compare" });
  const question = rows[0]?.question ?? "";

  async function column(name) {
    const group = groups.get(name);
    let which = 0;
    const box = h("section", { class: "column" });
    async function fill() {
      const row = group[which];
      const found = await get("trajectory", { run: query.run, split: row.split, step: row.step, line: row.line });
      const whole = found.rows.find((each) => each.line === row.line);
      box.replaceChildren(h("header", {}, h("b", {}, name), rewardBadge(row.reward), terminationBadge(row.termination),
        group.length > 1 && h("button", { class: "icon", title: "Another sample", onclick: () => { which = (which + 1) % group.length; fill(); } }, `${which + 1}/${group.length}`),
        h("a", { href: at(query.run, row) }, "Open")), chat(whole, query.run));
    }
    await fill();
    return box;
  }
  async function draw() {
    columns_.replaceChildren(...await Promise.all(names.filter((name) => shown.has(name)).map(column)));
  }
  view.replaceChildren(h("div", { class: "trail" }, h("button", { onclick: () => history.back() }, "← Back"),
    h("b", {}, question)), h("div", { class: "minis picker" }, names.map((name) => h("label", { class: "key" },
    h("input", { type: "checkbox", checked: shown.has(name), onchange: (event) => { if (event.target.checked) shown.add(name); else shown.delete(name); draw(); } }),
    name, rewardBadge(mean(groups.get(name)))))), columns_);
  await draw();
  return { keys: { Escape: () => history.back() } };
}

function mean(rows) {
  const values = rows.map((row) => row.reward).filter((value) => value !== null);
  return values.length ? values.reduce((sum, value) => sum + value, 0) / values.length : null;
}
