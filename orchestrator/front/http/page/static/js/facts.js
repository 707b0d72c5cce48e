// The figures behind the sentence, in words. Pure.

import { count, number, showRate, showTime } from "./dom.js";
import { digest } from "./link.js";

/** Returns what is known of a finished race besides its sentence. */
export function factsOf({ plain, rule, settings, ratios, verdict }) {
  const drafted = rule.rounds.filter((round) => round.drafted).length;
  const parts = [
    `Plain ${showRate(plain.tokensPerSecond)} tokens/s, ${settings.rule} ${showRate(rule.tokensPerSecond)} tokens/s`,
  ];
  if (ratios.length > 1) parts.push(`medians of ${ratios.length} runs each`);
  parts.push(`${count(plain.steps, "step")} of the target against ${number(rule.steps)}, ${number(drafted)} of them with drafts`);
  const differ = verdict.marks[1].filter(Boolean).length;
  if (plain.text !== rule.text) parts.push(`${number(differ)} of ${count(rule.tokens.length, "token")} differ`);
  if (rule.metrics?.num_rollbacks) parts.push(count(rule.metrics.num_rollbacks, "rollback"));
  for (const [name, run] of [["plain", plain], [settings.rule, rule]]) {
    const waited = run.recoveries.reduce((sum, { delay_ns: delay }) => sum + delay / 1e6, 0);
    if (waited) parts.push(`${name} waited ${showTime(waited)} for lost services`);
  }
  if ([plain, rule].some((run) => run.finishReason === "length")) parts.push(`cut at ${count(Number(settings.max_tokens), "token")}`);
  return `${[...parts, `seed ${settings.seed}`, ...rule.warnings].join("; ")}.`;
}

/** Says whether a race repeated the run of a link. */
export function repetitionOf({ plain, rule }, linked) {
  const differing = [["plain text", plain], ["rule's text", rule]].filter(
    ([, run], place) => digest(run.text) !== linked.texts[place],
  );
  if (!differing.length) return "Reproduced: both texts are those of the linked run.";
  const names = differing.map(([name]) => name).join(" and the ");
  const verb = differing.length > 1 ? "differ" : "differs";
  const why = linked.model === rule.model
    ? "its weights or numerics may be others"
    : `that was made with ${linked.model}`;
  return `Not reproduced: the ${names} ${verb} from the linked run; ${why}.`;
}
