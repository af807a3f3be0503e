// One step on the clock: which phase it was in, what each engine replica did, and why it did nothing.

export const KINDS = ["generate", "queue", "tools", "interaction", "environment", "reward"];
export const PHASES = [
  "rollout", "score", "baseline", "sleep", "log_probs", "values", "advantages", "update_critic", "update_actor", "sync_weights",
  "validation", "checkpoint",
];
// In these phases the engines have work if trajectories ask for it.
const ASKING = ["rollout", "baseline", "validation"];

// Within a rollout the trainer may compute what models say of the groups that have ended.
const WITHIN = { early_log_probs: "--phase-log_probs" };

// The color of a phase or kind, as the name of a custom property.
export const colorName = (name) => WITHIN[name] ?? (KINDS.includes(name) ? `--kind-${name}` : PHASES.includes(name) ? `--phase-${name}` : "--kind-other");

// The requests of each replica, by its number; "" where the run does not say which replica it was.
export function byReplica(requests) {
  const replicas = new Map();
  for (const [, at, length, replica, queued] of requests) {
    const key = replica >= 0 ? replica : "";
    if (!replicas.has(key)) replicas.set(key, []);
    replicas.get(key).push({ at, end: at + length, served: at + Math.min(queued ?? 0, length) });
  }
  return [...replicas].sort(([a], [b]) => (a === "" ? 1 : b === "" ? -1 : a - b));
}

// How many requests of a replica are served and how many wait, as [time, served, waiting] wherever that changes.
export function counts(requests) {
  const edges = requests.flatMap(({ at, end, served }) => [[at, 0, 1], [served, 1, -1], [end, -1, 0]]);
  edges.sort((a, b) => a[0] - b[0]);
  let [running, waiting] = [0, 0];
  return edges.map(([at, serve, wait]) => [at, (running += serve), (waiting += wait)]);
}

// First and last moment of what is drawn.
export function extent(phases, spans) {
  const all = [...phases, ...spans];
  return [
    all.reduce((least, [, at]) => Math.min(least, at), Infinity),
    all.reduce((most, [, at, length]) => Math.max(most, at + length), -Infinity),
  ];
}

// Seconds of all replicas together: with a request, and without one by what kept them waiting.
// rollouts: the spans of each rollout of the step.
export function replicaSeconds(replicas, rollouts, phases, [start, end]) {
  const edges = [[end, "end", 0]];
  const note = (kind, at, until, key) => edges.push([at, kind, 1, key], [until, kind, -1, key]);
  for (const [number, requests] of replicas) requests.forEach(({ at, end: until }) => note("request", at, until, number));
  for (const spans of rollouts.filter((each) => each.length)) {
    note("span", ...extent([], spans), "agent loops");
    for (const [kind, at, length] of spans) if (kind !== "generate") note("span", at, at + length, kind);
  }
  for (const [name, at, length] of phases) note("phase", at, at + length, name);
  edges.sort((a, b) => a[0] - b[0]);
  const now = { request: new Map(), span: new Map(), phase: new Map() };
  const found = {};
  let before = start;
  for (const [at, kind, change, key] of edges) {
    const here = Math.min(at, end);
    if (here > before) {
      const busy = replicas.filter(([number]) => now.request.get(number) > 0).length;
      const add = (name, count) => count && (found[name] = (found[name] ?? 0) + count * (here - before));
      add("generate", busy);
      add(cause(now, busy, phases.length > 0), replicas.length - busy);
      before = here;
    }
    now[kind]?.set(key, (now[kind].get(key) ?? 0) + change);
  }
  return Object.entries(found).sort(([a, first], [b, second]) => (b === "generate") - (a === "generate") || second - first);
}

function cause(now, busy, known) {
  const on = (map, names) => names.find((name) => map.get(name) > 0);
  const other = on(now.phase, PHASES.filter((name) => !ASKING.includes(name)));
  if (other) return other;
  if (known && !on(now.phase, ASKING)) return "between phases";
  return on(now.span, KINDS) ?? (busy ? "other replicas busy" : on(now.span, ["agent loops"]) ?? "no trajectories");
}
