// Elements and numbers. Text only ever becomes a text node, so nothing that a model wrote can become markup.

export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.entries(value).forEach(([key, each]) => element.style.setProperty(key, each));
    else if (name === "value" || name === "checked" || name === "selected" || name === "open") element[name] = value;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// A name that breaks after slashes and underscores, so that none is cut.
export const breakable = (name) => name.split(/(?<=[/_])/).flatMap((part, i) => (i ? [h("wbr"), part] : [part]));

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(3).filter(Boolean));
  return element;
}

export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size >= 1e5 || (size > 0 && size < 1e-3)) return value.toExponential(2);
  return value.toFixed(size >= 100 ? 1 : digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

export const signed = (value, digits) => (value > 0 ? "+" : "") + number(value, digits);

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 3600) return `${(value / 3600).toFixed(1)} h`;
  if (value >= 60) return `${Math.floor(value / 60)}m ${Math.round(value % 60)}s`;
  if (value >= 1) return `${value.toFixed(1)} s`;
  return value >= 0.001 ? `${(value * 1000).toFixed(value >= 0.1 ? 0 : 1)} ms` : `${(value * 1e6).toFixed(0)} µs`;
}

export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;

export const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

export function rewardBadge(reward) {
  const tone = reward === null || reward === undefined ? "none" : reward > 0 ? "good" : reward < 0 ? "bad" : "zero";
  return h("span", { class: `badge reward ${tone}`, title: "reward" }, number(reward, 2));
}

export function terminationBadge(name) {
  const bad = !["completed", "length", "max_turns"].includes(name);
  return h("span", { class: `badge termination ${bad ? "bad" : name}` }, name);
}

let tip = null;

// A tooltip that follows the pointer; lines is a list of [name, value].
export function showTip(event, title, lines = []) {
  tip ??= document.body.appendChild(h("div", { class: "tip", role: "tooltip" }));
  const pairs = lines.map(([name, value]) => [h("dt", {}, name), h("dd", {}, value)]);
  tip.replaceChildren(title ? h("b", {}, title) : "", h("dl", {}, pairs));
  tip.hidden = false;
  const { width, height } = tip.getBoundingClientRect();
  const left = Math.max(4, Math.min(event.clientX + 12, innerWidth - width - 8));
  const top = event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18;
  tip.style.left = `${left}px`;
  tip.style.top = `${Math.max(4, top)}px`;
}

export function hideTip() {
  if (tip) tip.hidden = true;
}
