// Runs both generations, one after the other, and records them.

import { Recording } from "./recording.js";
import { readFrames, request } from "./stream.js";

const SILENT_MS = 600;
const ASK_MS = 1000; // between questions whether the server is ready
const WARM_UP_TOKENS = 16;
const SETTLE_MS = 80; // so that drawing the page does not take the cores from a run
const SHORT_MS = 2000;
const SHORT_REPEATS = 3;

/**
 * Runs a race: `setup` is {path, body, speculation: {plain, rule}, repeats}; `repeats` null: several
 * if the runs are short, since their times vary most.
 *
 * Both models read the prompt once beforehand, so that neither run has the advantage of the other's
 * cache and a refused rule is refused at once; who goes first takes turns. Watchers: `begin(side, turn)`, `progress(side, recording)`,
 * `done(side, recording)`, `silent(side, seconds, ready)`. Returns {plain, rule, ratios}: the recordings, of several those of
 * median speed, and how much faster the rule was in each turn.
 */
export async function runRace(setup, watchers, { key, signal }) {
  const ask = { method: "POST", key, signal };
  const warmUp = { ...setup.body, max_tokens: Math.min(WARM_UP_TOKENS, setup.body.max_tokens), speculation: setup.speculation.rule };
  await (await request(setup.path, { ...ask, body: warmUp })).json();
  const runs = { plain: [], rule: [] };
  let repeats = setup.repeats ?? 1;
  for (let turn = 0; turn < repeats; turn += 1) {
    for (const side of turn % 2 ? ["rule", "plain"] : ["plain", "rule"]) {
      watchers.begin(side, turn);
      await settled(signal);
      const body = {
        ...setup.body, speculation: setup.speculation[side], stream: true, return_origins: true,
        return_token_ids: true, return_token_texts: true, return_rounds: true,
        stream_options: { include_usage: true, include_elapsed_ms: true },
      };
      const recording = await record(setup.path, { ...ask, body }, side, watchers);
      runs[side].push(recording);
      watchers.done(side, recording);
    }
    const ms = runs.plain[0].ms + runs.rule[0].ms;
    if (setup.repeats === null && ms < SHORT_MS) repeats = SHORT_REPEATS;
  }
  const ratios = runs.plain.map((run, turn) => runs.rule[turn].tokensPerSecond / run.tokensPerSecond);
  return { plain: median(runs.plain), rule: median(runs.rule), ratios };
}

/** Waits until the page has been drawn. */
async function settled(signal) {
  await new Promise((resolve) => setTimeout(resolve, SETTLE_MS));
  signal.throwIfAborted();
}

async function record(path, ask, side, watchers) {
  const recording = new Recording();
  let heard = performance.now();
  let asked = -Infinity;
  let ready = true;
  const watch = setInterval(async () => {
    if (performance.now() - heard < SILENT_MS) return;
    if (performance.now() - asked >= ASK_MS) {
      asked = performance.now();
      ready = await fetch("health").then((answer) => answer.ok, () => false);
    }
    const silentMs = performance.now() - heard;
    if (silentMs >= SILENT_MS) watchers.silent(side, silentMs / 1000, ready);
  }, 200);
  try {
    for await (const frame of readFrames(await request(path, ask))) {
      heard = performance.now();
      recording.add(frame);
      watchers.progress(side, recording);
    }
  } finally {
    clearInterval(watch);
  }
  return recording;
}

function median(runs) {
  const sorted = [...runs].sort((a, b) => a.tokensPerSecond - b.tokensPerSecond);
  return sorted[sorted.length >> 1];
}
