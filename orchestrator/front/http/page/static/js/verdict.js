// The sentence that sums up a race, and what it is computed from. Pure.

import { differences } from "./diff.js";

const MARKED = [/####\s*(\S[^\n]*)/g, /\\boxed\{([^{}]*)\}/g];
const ASKS_FOR_NUMBER = /how (many|much|old|long|far)|what is the (total|sum|difference)|left (over)?\?/i;
const NUMBER = /-?\d[\d,]*(?:\.\d+)?/g;

/**
 * Returns the final answer in a text, or null: what follows `####` (GSM8K) or is in `\boxed{}`, else
 * the last number if the prompt asks for one.
 */
export function finalAnswer(text, prompt) {
  for (const pattern of MARKED) {
    const found = [...text.matchAll(pattern)].at(-1);
    if (found) return normal(found[1]);
  }
  if (!ASKS_FOR_NUMBER.test(prompt)) return null;
  const number = (text.match(NUMBER) ?? []).at(-1);
  return number === undefined ? null : normal(number);
}

function normal(answer) {
  const text = answer.trim().replace(/[.\s]+$/, "");
  const number = Number(text.replace(/[$,\s]/g, ""));
  return text !== "" && Number.isFinite(number) ? String(number) : text;
}

/**
 * Compares a recorded rule with recorded plain decoding; `ratios` are the speeds of each turn.
 *
 * Returns {ratio, speed, loss, outcome, agree, marks, sentence}; `agree` is false if answers or, where
 * there are none, texts differ; `marks` say which tokens of either text the other does not have.
 */
export function judgeRace(plain, rule, prompt, ratios = []) {
  const ratio = plain.tokensPerSecond > 0 ? rule.tokensPerSecond / plain.tokensPerSecond : 1;
  const marks = differences(texts(plain), texts(rule));
  const { outcome, agree } = compare(plain, rule, prompt, marks);
  const speed = `${speedOf(ratio)} (${spreadOf(ratios)})`;
  const loss = lossOf(rule);
  return { ratio, speed, loss, outcome, agree, marks, sentence: `${speed}, ${loss}, ${outcome}` };
}

const texts = (recording) => recording.tokens.map((token) => token.text);

export function speedOf(ratio) {
  const rounded = (value) => (value < 10 ? value.toFixed(1) : value.toFixed(0));
  if (rounded(ratio) === "1.0" || rounded(1 / ratio) === "1.0") return "The same speed";
  return ratio > 1 ? `${rounded(ratio)} times faster` : `${rounded(1 / ratio)} times slower`;
}

/** Says how far the turns of a race were apart. */
export function spreadOf(ratios) {
  if (ratios.length < 2) return "one race, so the spread is unknown";
  const [low, high] = [Math.min(...ratios), Math.max(...ratios)].map((ratio) => ratio.toFixed(1));
  return `${low === high ? low : `${low} to ${high}`} times in ${ratios.length} races`;
}

function lossOf(rule) {
  if (rule.numLoose === 0) return "no loose tokens";
  const tokens = rule.numLoose === 1 ? "1 loose token" : `${rule.numLoose} loose tokens`;
  return `${tokens}, ${rule.looseNats.toFixed(2)} nats`;
}

function compare(plain, rule, prompt, marks) {
  if (plain.text === rule.text) return { outcome: "same text", agree: true };
  const answers = [plain, rule].map((run) =>
    run.finishReason === "length" ? marked(run.text) : finalAnswer(run.text, prompt),
  );
  if (answers[0] !== null && answers[1] !== null) {
    const agree = answers[0] === answers[1];
    return { outcome: agree ? "same answer" : `different answer: ${answers[1]}, not ${answers[0]}`, agree };
  }
  const count = Math.max(...marks.map((side) => side.filter(Boolean).length));
  const total = Math.max(...marks.map((side) => side.length));
  return { outcome: `different text: ${count} of ${total} tokens differ`, agree: false };
}

/** An unfinished text has an answer only where it says that it is one. */
const marked = (text) => finalAnswer(text, "");
