// What is said below the sentence, and of a repeated run.
import assert from "node:assert/strict";
import { test } from "node:test";

import { factsOf, repetitionOf } from "../../../orchestrator/front/http/page/static/js/facts.js";
import { digest } from "../../../orchestrator/front/http/page/static/js/link.js";

const run = (text, more = {}) => ({
  text, model: "target", tokens: text.split(""), rounds: [], steps: text.length, tokensPerSecond: 100, recoveries: [],
  warnings: [], finishReason: "stop", ...more,
});

test("facts name what the sentence leaves out", () => {
  const facts = factsOf({
    plain: run("abcd"),
    rule: run("abxd", {
      rounds: [{ drafted: 3 }], steps: 2, tokensPerSecond: 250, recoveries: [{ delay_ns: 2.5e9 }],
      metrics: { num_rollbacks: 1 }, finishReason: "length",
    }),
    settings: { rule: "margin", max_tokens: "4", seed: "7" },
    ratios: [2.4, 2.5, 2.6],
    verdict: { marks: [[false, false, true, false], [false, false, true, false]] },
  });
  assert.equal(
    facts,
    "Plain 100 tokens/s, margin 250 tokens/s; medians of 3 runs each; 4 steps of the " +
      "target against 2, 1 of them with drafts; 1 of 4 tokens differ; 1 rollback; margin waited 2.50 s for lost " +
      "services; cut at 4 tokens; seed 7.",
  );
});

test("a repeated run says what differs", () => {
  const race = { plain: run("a"), rule: run("b") };
  const linked = (...texts) => ({ model: "target", texts: texts.map(digest) });
  assert.match(repetitionOf(race, linked("a", "b")), /^Reproduced/);
  assert.match(repetitionOf(race, linked("a", "x")), /^Not reproduced: the rule's text differs/);
  assert.match(repetitionOf(race, { ...linked("x", "x"), model: "other" }), /plain text and the rule's text differ .* other/);
});
