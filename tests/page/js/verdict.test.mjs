// The sentence of a race, its differences, and its link.
import assert from "node:assert/strict";
import { test } from "node:test";

import { differences } from "../../../orchestrator/front/http/page/static/js/diff.js";
import { decodeLink, decodeRounds, encodeLink, encodeRounds } from "../../../orchestrator/front/http/page/static/js/link.js";
import { Recording } from "../../../orchestrator/front/http/page/static/js/recording.js";
import { EventSplitter } from "../../../orchestrator/front/http/page/static/js/stream.js";
import { finalAnswer, judgeRace, speedOf, spreadOf } from "../../../orchestrator/front/http/page/static/js/verdict.js";

const ASKS = "How many are left?";

function recorded(words, ms, { gaps = {}, finishReason = "stop" } = {}) {
  const recording = new Recording();
  recording.tokens = words.map((text, index) => ({
    text, origin: index in gaps ? "LOOSE" : "PLAIN", gap: gaps[index] ?? null, ms,
  }));
  recording.finishReason = finishReason;
  return recording;
}

test("the sentence tells speed, loss and whether the answer is the same", () => {
  const plain = recorded(["Now ", "4 left", ".\n", "#### ", "4"], 330);
  const rule = recorded(["So ", "4 left", ".\n", "#### ", "4"], 100, { gaps: { 0: 0.38 } });
  const race = judgeRace(plain, rule, ASKS, [3.3, 2.9, 3.6]);
  assert.equal(race.sentence, "3.3 times faster (2.9 to 3.6 times in 3 races), 1 loose token, 0.38 nats, same answer");
  assert.deepEqual(race.marks, [[true, false, false, false, false], [true, false, false, false, false]]);
});

test("a slower rule and another answer are said plainly", () => {
  const plain = recorded(["#### 4"], 100);
  const rule = recorded(["#### 5"], 110);
  const { sentence, agree } = judgeRace(plain, rule, ASKS);
  assert.equal(sentence, "1.1 times slower (one race, so the spread is unknown), no loose tokens, different answer: 5, not 4");
  assert.equal(agree, false);
});

test("without an answer, texts are compared", () => {
  const plain = recorded(["def ", "f", "(x):"], 100);
  assert.match(judgeRace(plain, recorded(["def ", "f", "(x):"], 50), "x").sentence, /same text$/);
  assert.match(
    judgeRace(plain, recorded(["def ", "g", "(x):"], 50), "x").sentence,
    /different text: 1 of 3 tokens differ$/,
  );
});

test("an unfinished text has no answer unless it marks one", () => {
  const plain = recorded(["there are ", "4"], 100, { finishReason: "length" });
  const rule = recorded(["there are ", "5"], 100, { finishReason: "length" });
  assert.match(judgeRace(plain, rule, ASKS).sentence, /different text/);
});

test("speeds near one are the same speed", () => {
  assert.equal(speedOf(1.04), "The same speed");
  assert.equal(speedOf(0.97), "The same speed");
  assert.equal(speedOf(1.06), "1.1 times faster");
  assert.equal(speedOf(0.5), "2.0 times slower");
  assert.equal(speedOf(12.3), "12 times faster");
});

test("the spread of one race is unknown", () => {
  assert.equal(spreadOf([2.44]), "one race, so the spread is unknown");
  assert.equal(spreadOf([2.41, 2.39, 2.42]), "2.4 times in 3 races");
});

test("final answers are found where they are marked, or asked for", () => {
  assert.equal(finalAnswer("3 + 4 = 7.\n#### 1,007", ""), "1007");
  assert.equal(finalAnswer("so \\boxed{7.0} it is", ""), "7");
  assert.equal(finalAnswer("There are 12 left.", ASKS), "12");
  assert.equal(finalAnswer("There are 12 left.", "Tell me a story."), null);
});

test("differences are outside the longest common subsequence", () => {
  assert.deepEqual(differences([..."abcde"], [..."axcdy"]), [
    [false, true, false, false, true],
    [false, true, false, false, true],
  ]);
  assert.deepEqual(differences([], ["a"]), [[], [true]]);
});

test("a link gives back settings and run", () => {
  const settings = { prompt: "a & b\n#?", rule: "fly", seed: "5", drafter: "" };
  const link = encodeLink(settings, { rounds: [0, 15, 15, 7], model: "target", texts: ["x", "y"] });
  assert.match(link, /rounds=0.15x2.7/);
  const decoded = decodeLink(link);
  assert.deepEqual(decoded.settings, { prompt: "a & b\n#?", rule: "fly", seed: "5" });
  assert.deepEqual(decoded.run.rounds, [0, 15, 15, 7]);
  assert.equal(decodeLink("#nothing"), null);
});

test("rounds that are none are refused", () => {
  assert.equal(decodeRounds("5x"), null);
  assert.equal(decodeRounds("9x999999.1x999999"), null);
  assert.deepEqual(decodeRounds(encodeRounds([])), null);
});

test("events are complete when their blank line has come", () => {
  const splitter = new EventSplitter();
  assert.deepEqual(splitter.push('data: {"a"'), []);
  assert.deepEqual(splitter.push(': 1}\n\ndata: [DO'), ['{"a": 1}']);
  assert.deepEqual(splitter.push("NE]\n\n: comment\n\n"), ["[DONE]"]);
});
