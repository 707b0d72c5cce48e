// What is known of a token, a round or a recovery, in words and figures. Pure.

import { count, showTime, visible } from "./dom.js";

const RECOVERIES = {
  TARGET_REOPENED: "Target lost and reopened",
  DRAFTER_REOPENED: "Drafter lost and reopened",
  DRAFTER_REPLACED: "Drafter lost; another took over",
  DRAFTER_FALLBACK: "No drafter works; drafting by prompt lookup",
  DRAFTER_RESTORED: "Drafter back",
  DRAFTER_SWAPPED: "Drafter switched by the operator",
};

/** Describes a recovery, as shown where it happened. */
export function recoveryText({ kind, delay_ns: delay, successor, reason }) {
  const what = RECOVERIES[kind] ?? kind;
  const where = successor ? `, now ${successor}` : "";
  return `${what} after ${showTime(delay / 1e6)}${where}${reason ? ` (${reason})` : ""}`;
}

const OUTCOMES = {
  exact: "accepted: the target's own token",
  loose: "accepted loosely",
  rejected: "rejected",
  unreached: "not reached",
  rolledBack: "rolled back: its window failed",
};

/**
 * Describes a token: {title, rows}, rows being [name, value]. `labels` maps origins to words, `measure` is
 * what the rule takes entropies in.
 */
export function describeToken(recording, index, { labels, measure }) {
  const token = recording.tokens[index];
  const round = recording.rounds[token.round];
  const rows = [["origin", labels[token.origin] ?? token.origin]];
  if (round) {
    rows.push(["round", `${round.index + 1} of ${recording.rounds.length}`]);
    if (token.draft !== null) {
      rows.push(["draft", `${token.draft + 1} of ${round.drafted} by ${round.drafter || "prompt lookup"}`]);
    }
    rows.push(...choiceRows(round, token, measure));
  }
  if (token.gap !== null && !rows.some(([name]) => name === "gap")) rows.push(["gap", nats(token.gap)]);
  rows.push(["position", `${index + 1} of ${recording.tokens.length}, after ${showTime(token.ms)}`]);
  return { title: `“${visible(token.text)}”`, rows };
}

/** What the target chose, and how sure it was: from the decision on the draft at this position. */
function choiceRows(round, token, measure) {
  const place = token.draft ?? (round.keep_length >= round.start_length ? round.keep_length - round.start_length : -1);
  const decision = round.decisions[place];
  const rows = [];
  if (token.draft === null) {
    if (decision) rows.push(["rejected draft", `“${visible(round.draft_token_texts[place])}”`]);
    rows.push(["target's choice", "this token"]);
  } else {
    const other = decision?.target_token_text ?? null;
    rows.push(["target's choice", other === null ? "the same" : `“${visible(other)}”`]);
  }
  return [...rows, ...figureRows(decision, measure)];
}

function figureRows(decision, measure = "") {
  const rows = [];
  if (isNumber(decision?.entropy)) rows.push(["entropy", `${decision.entropy.toFixed(3)}${measure ? ` (${measure})` : ""}`]);
  if (isNumber(decision?.gap_nats)) rows.push(["gap", nats(decision.gap_nats)]);
  if (isNumber(decision?.measure)) rows.push(["rule's measure", decision.measure.toFixed(3)]);
  return rows;
}

const isNumber = (value) => typeof value === "number";
const nats = (value) => `${value.toFixed(3)} nats`;

/** Returns the target's steps in a bar. */
export const stepsOf = ({ rounds }, { first, last }) =>
  rounds.slice(first, last + 1).reduce((sum, round) => sum + round.steps, 0);

/** Describes a round, or a stretch of plain ones: {title, rows, drafts}; drafts are {text, fate, title}. */
export function describeRound(recording, { first, last }) {
  const round = recording.rounds[first];
  if (round.drafted === 0) {
    const title = first === last ? `Round ${first + 1}` : `Rounds ${first + 1} to ${last + 1}`;
    const tokens = count(stepsOf(recording, { first, last }), "token");
    return { title, rows: [["no drafts", `${tokens} of plain decoding`]], drafts: [] };
  }
  const rows = [
    ["drafted", `${round.drafted} by ${round.drafter || "prompt lookup"}`],
    ["accepted", `${round.exact + round.loose}${round.loose ? `, ${round.loose} of them loosely` : ""}`],
  ];
  if (round.rolledBack) rows.push(["rolled back", `${round.rolledBack}`]);
  if (round.rejected) rows.push(...rejectedRows(round));
  if (round.unreached) rows.push(["not reached", `${round.unreached}`]);
  rows.push(["target added", `“${visible(round.next_token_text)}”`]);
  if (round.open_window) rows.push(["open window", `needed ${round.open_window.remaining_matches} more matches`]);
  rows.push(["judged after", showTime(round.ms)]);
  const drafts = round.draft_token_texts.map((text, place) => ({
    text: visible(text), fate: round.fates[place], title: OUTCOMES[round.fates[place]],
  }));
  return { title: `Round ${first + 1} of ${recording.rounds.length}`, rows, drafts };
}

function rejectedRows(round) {
  const place = round.fates.indexOf("rejected");
  const { target_token_text: target } = round.decisions[place];
  const texts = `“${visible(round.draft_token_texts[place])}”`;
  return [
    ["rejected", `${texts}${target === null ? "" : `; the target has “${visible(target)}”`}`],
    ...figureRows(round.decisions[place]),
  ];
}

/** Describes either in one line, for screen readers. */
export const inOneLine = ({ title, rows }) => [title, ...rows.map((row) => row.join(": "))].join(", ");
