// Runs both generations, one after the other, and records them.

import { Recording } from "./recording.js";
import { readFrames, request } from "./stream.js";

const SILENT_MS = 600;

/**
 * Runs a race: `setup` is {path, body, speculation: {plain, rule}, repeats}.
 *
 * The prompt is read once beforehand, so that neither run has the advantage of the other's cache.
 * Watchers: `begin(side, turn)`, `progress(side, recording)`, `silent(side, seconds, ready)`. Returns
 * the recordings {plain, rule}; of several, those of median speed.
 */
export async function runRace(setup, watchers, { key, signal }) {
  const ask = { method: "POST", key, signal };
  const warmUp = { ...setup.body, max_tokens: 1, speculation: setup.speculation.plain };
  await (await request(setup.path, { ...ask, body: warmUp })).json();
  const runs = { plain: [], rule: [] };
  for (let turn = 0; turn < setup.repeats; turn += 1) {
    for (const side of ["plain", "rule"]) {
      watchers.begin(side, turn);
      const body = {
        ...setup.body, speculation: setup.speculation[side], stream: true, return_origins: true,
        return_token_ids: true, return_token_texts: true, return_rounds: true,
        stream_options: { include_usage: true, include_elapsed_ms: true },
      };
      runs[side].push(await record(setup.path, { ...ask, body }, side, watchers));
    }
  }
  return { plain: median(runs.plain), rule: median(runs.rule) };
}

async function record(path, ask, side, watchers) {
  const recording = new Recording();
  let heard = performance.now();
  let asking = false;
  const watch = setInterval(async () => {
    const silentMs = performance.now() - heard;
    if (silentMs < SILENT_MS || asking) return;
    asking = true;
    const ready = await fetch("health").then((answer) => answer.ok, () => false);
    asking = false;
    if (performance.now() - heard >= SILENT_MS) watchers.silent(side, silentMs / 1000, ready);
  }, 250);
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
