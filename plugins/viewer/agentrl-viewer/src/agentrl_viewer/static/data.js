// Where the page gets its data: the server that served it, or what an exported file holds.

const embedded = document.getElementById("data");
const held = embedded ? JSON.parse(embedded.textContent) : null;

export const exported = held !== null;
export const leftOut = held?.left_out ?? 0;

async function ask(name, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const response = await fetch(`api/${name}?${new URLSearchParams(given)}`);
  if (!response.ok) throw new Error(`${response.status}: ${await response.text()}`);
  return response.json();
}

const runOf = (name) => held.runs.find((run) => run.summary.name === name);

const ORDERS = {
  newest: (a, b) => b.step - a.step,
  oldest: (a, b) => a.step - b.step,
  failed: (a, b) => b.problem - a.problem || b.step - a.step,
  reward: (a, b) => (a.reward ?? -Infinity) - (b.reward ?? -Infinity),
  "-reward": (a, b) => (b.reward ?? -Infinity) - (a.reward ?? -Infinity),
  "-tokens": (a, b) => b.tokens - a.tokens,
  "-seconds": (a, b) => b.seconds - a.seconds,
};
const TRAINED = ["completed", "length", "max_turns", "tool_error", "env_error"];

function textOf(run, row) {
  const whole = run.trajectories[run.places[run.list.indexOf(row)]];
  const rows = whole.rows.filter((each) => each.line === row.line);
  return rows.map((each) => each.prompt_text + (each.segments ?? []).map(([, text]) => text).join("")).join("\n");
}

// The same filter as the server's, over the trajectories that the file holds.
function filtered(run, query) {
  const has = (text, part) => (text ?? "").toLowerCase().includes(part.toLowerCase());
  const tests = {
    split: (row, value) => row.split === value,
    first_step: (row, value) => row.step >= +value,
    last_step: (row, value) => row.step <= +value,
    min_reward: (row, value) => row.reward !== null && row.reward >= +value,
    max_reward: (row, value) => row.reward !== null && row.reward <= +value,
    termination: (row, value) =>
      value === "failed" ? !TRAINED.includes(row.termination) : row.termination === value,
    tool: (row, value) => row.tools.includes(value),
    error: (row, value) => (value === "*" ? row.problem > 0 : has(row.error, value)),
    text: (row, value) => has(textOf(run, row), value),
    uid: (row, value) => row.uid === value,
    prompt: (row, value) => row.prompt === value,
  };
  const used = Object.entries(query).filter(([name, value]) => tests[name] && value !== "" && value != null);
  const rows = run.list.filter((row) => used.every(([name, value]) => tests[name](row, value)));
  return rows.sort(ORDERS[query.order ?? "newest"]);
}

function answer(name, query) {
  if (name === "runs") return held.runs.map((run) => run.summary);
  const run = runOf(query.run);
  if (name === "list") {
    const rows = filtered(run, query);
    return { total: rows.length, rows: rows.slice(query.offset, query.offset + query.limit) };
  }
  if (name === "trajectory") {
    const at = (row) => row.split === query.split && row.step === +query.step && row.line === +query.line;
    const found = run.trajectories[run.places[run.list.findIndex(at)]];
    if (!found) throw new Error("this file does not hold that trajectory");
    return { ...found, line: +query.line };
  }
  if (name === "timeline") return run.timelines[`${query.split}/${query.step}`] ?? { lanes: [], timing: {}, spans: [], others: [], phases: [] };
  return run[name];
}

export async function get(name, query = {}) {
  return exported ? answer(name, query) : ask(name, query);
}

// Where an image of a run is; undefined where an exported file does not hold it.
export function imageAt(run, name) {
  return exported ? runOf(run).images[name] : `media/${name}?${new URLSearchParams({ run })}`;
}

// Whether an exported file can show this trajectory.
export function holds(run, row) {
  return !exported || runOf(run).list.some((e) => e.split === row.split && e.step === row.step && e.line === row.line);
}

export function timelineSteps(run) {
  return exported ? Object.keys(runOf(run).timelines) : null;
}
