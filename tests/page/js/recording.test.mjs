// Which round a token came from, and what became of the drafts.
import assert from "node:assert/strict";
import { test } from "node:test";

import { Recording } from "../../../orchestrator/front/http/page/static/js/recording.js";

const decisions = (letters) =>
  [...letters].map((letter) => ({
    outcome: { E: "EXACT", L: "LOOSE", P: "PROVISIONAL", R: "REJECTED", N: "NOT_REACHED" }[letter],
  }));

function round(start, letters, keep) {
  const draft = [...letters];
  return { start_length: start, keep_length: keep, draft_token_ids: draft, decisions: decisions(letters) };
}

function frame(ms, texts, origins, gaps = []) {
  const choice = { token_ids: texts.map((_, i) => i), token_texts: texts, origins, loose_gaps_nats: gaps };
  return { elapsed_ms: ms, choices: [choice] };
}

test("tokens know their round, drafts their fate", () => {
  const recording = new Recording();
  recording.add({ elapsed_ms: 1, choices: [{ rounds: [round(10, "", 10)] }] });
  recording.add(frame(1, ["a"], ["PLAIN"]));
  recording.add({ elapsed_ms: 5, choices: [{ rounds: [round(11, "ELRNN", 13)] }] });
  recording.add(frame(5, ["b", "c", "d"], ["EXACT_MODEL", "LOOSE", "CORRECTION"], [0.25]));
  recording.add({
    elapsed_ms: 6,
    choices: [{ finish_reason: "stop", seed: 3, num_draft_tokens_per_round: [0, 5], prompt_token_ids: Array(10).fill(1) }],
  });
  assert.deepEqual(recording.tokens.map(({ round: r, draft }) => [r, draft]), [[0, null], [1, 0], [1, 1], [1, null]]);
  const { drafted, exact, loose, rejected, unreached, rolledBack } = recording.rounds[1];
  assert.deepEqual([drafted, exact, loose, rejected, unreached, rolledBack], [5, 1, 1, 1, 2, 0]);
  assert.equal(recording.looseNats, 0.25);
  assert.equal(recording.ms, 5);
  assert.equal(recording.tokensPerSecond, 800);
});

test("drafts that a failed window drops count as rolled back", () => {
  const recording = new Recording();
  recording.add({ elapsed_ms: 1, choices: [{ rounds: [round(4, "EPE", 7), round(8, "RN", 5)] }] });
  recording.add(frame(2, ["a", "b"], ["EXACT_MODEL", "CORRECTION"]));
  recording.add({ elapsed_ms: 3, choices: [{ finish_reason: "length", prompt_token_ids: [1, 2, 3, 4] }] });
  const [first, second] = recording.rounds;
  assert.deepEqual([first.exact, first.loose, first.rolledBack], [1, 0, 2]);
  assert.deepEqual([second.rejected, second.unreached], [1, 1]);
  assert.deepEqual(recording.tokens.map((token) => token.round), [0, 1]);
});

test("a round without drafts may be several steps of plain decoding", () => {
  const recording = new Recording();
  recording.add({ elapsed_ms: 1, choices: [{ rounds: [round(4, "", 4), round(5, "", 12), round(13, "EE", 15)] }] });
  recording.add({ elapsed_ms: 3, choices: [{ finish_reason: "length", prompt_token_ids: [1, 2, 3, 4] }] });
  assert.deepEqual(recording.rounds.map(({ steps }) => steps), [1, 8, 1]);
  assert.equal(recording.steps, 10);
});

test("so do drafts that a window drops within their own round", () => {
  const recording = new Recording();
  recording.add({ elapsed_ms: 1, choices: [{ rounds: [round(4, "EPEN", 5)] }] });
  recording.add({ elapsed_ms: 3, choices: [{ finish_reason: "length", prompt_token_ids: [1, 2, 3, 4] }] });
  const { exact, rolledBack, unreached } = recording.rounds[0];
  assert.deepEqual([exact, rolledBack, unreached], [1, 2, 1]);
});

test("tokens of plain decoding that were sent together came one by one", () => {
  const recording = new Recording();
  recording.add(frame(10, ["a"], ["PLAIN"]));
  recording.add(frame(40, ["b", "c", "d"], ["PLAIN", "PLAIN", "PLAIN"]));
  recording.add(frame(60, ["e", "f"], ["EXACT_MODEL", "BONUS"]));
  assert.deepEqual(recording.tokens.map(({ ms }) => ms), [10, 20, 30, 40, 60, 60]);
});
