// A generation as it was recorded: tokens and rounds on the server's clock. Pure.

const WITH_ACCEPTANCE = new Set(["EXACT", "LOOSE", "PROVISIONAL"]);

/** What a stream's frames say, gathered; `add` takes them in order. */
export class Recording {
  /** {text, id, origin, gap, ms, round, draft}: `round` is an index, `draft` the place in its drafts. */
  tokens = [];
  /** Rounds as the server describes them, each with `ms`. */
  rounds = [];
  /** {kind, output_token_index, delay_ns, successor, reason}, known at the end. */
  recoveries = [];
  warnings = [];
  numDraftTokensPerRound = [];
  finishReason = null;
  seed = null;
  model = "";
  fingerprint = "";
  metrics = null;
  #promptLength = null;

  add(frame) {
    const ms = frame.elapsed_ms ?? 0;
    this.model = frame.model ?? this.model;
    this.fingerprint = frame.system_fingerprint ?? this.fingerprint;
    for (const choice of frame.choices ?? []) this.#addChoice(choice, ms);
    this.metrics = frame.metrics?.speculative_decoding ?? this.metrics;
    this.recoveries = frame.recoveries ?? this.recoveries;
    this.warnings = frame.warnings ?? this.warnings;
  }

  #addChoice(choice, ms) {
    for (const round of choice.rounds ?? []) this.rounds.push({ ...round, ms });
    const gaps = [...(choice.loose_gaps_nats ?? [])];
    const ids = choice.token_ids ?? [];
    const times = timesOf(choice.origins ?? [], this.ms, ms);
    ids.forEach((id, index) => {
      const origin = choice.origins[index];
      const gap = origin === "LOOSE" ? gaps.shift() : null;
      const text = choice.token_texts[index];
      this.tokens.push({ text, id, origin, gap, ms: times[index], round: null, draft: null });
    });
    if (!choice.finish_reason) return;
    this.finishReason = choice.finish_reason;
    this.seed = choice.seed ?? null;
    this.numDraftTokensPerRound = choice.num_draft_tokens_per_round ?? [];
    this.#promptLength = choice.prompt_token_ids?.length ?? null;
    this.rounds = withOutcomes(this.rounds, this.tokens, this.promptLength);
  }

  /** Tokens of the prompt; before the end, as the first round implies. */
  get promptLength() {
    return this.#promptLength ?? this.rounds[0]?.start_length ?? 0;
  }

  get text() {
    return this.tokens.map((token) => token.text).join("");
  }

  /** Milliseconds from the request's arrival to the last token. */
  get ms() {
    return this.tokens.at(-1)?.ms ?? 0;
  }

  get tokensPerSecond() {
    return rate(this.tokens.length, this.ms);
  }

  /** Steps of the target. */
  get steps() {
    return this.rounds.reduce((sum, round) => sum + round.steps, 0);
  }

  get numLoose() {
    return this.tokens.filter((token) => token.origin === "LOOSE").length;
  }

  get looseNats() {
    return this.tokens.reduce((sum, token) => sum + (token.gap ?? 0), 0);
  }
}

/**
 * Returns the times of a message's tokens. Those of a round came at once; those of plain decoding came
 * one by one and were sent together, so they are spread over the time since the message before.
 */
function timesOf(origins, before, now) {
  const plain = origins.every((origin) => origin === "PLAIN");
  return origins.map((_, index) => (plain ? before + ((now - before) * (index + 1)) / origins.length : now));
}

export function rate(count, ms) {
  return ms > 0 ? (1000 * count) / ms : 0;
}

/**
 * Returns the rounds with `drafted` and what became of the drafts: `exact`, `loose`, `rejected`,
 * `unreached`, `rolledBack`; their sum is `drafted`. `steps` are the target's: a round without drafts
 * may be several tokens of plain decoding. Notes at each token the round it came from.
 *
 * Rolled back are drafts that were accepted at first and dropped when their window failed.
 */
export function withOutcomes(rounds, tokens, promptLength) {
  const owners = []; // by output position: {round, draft, outcome}; draft null: the target's own
  const counted = rounds.map((round, index) => {
    const counts = { exact: 0, loose: 0, rejected: 0, unreached: 0, rolledBack: 0 };
    const drafted = round.draft_token_ids.length;
    const fates = round.draft_token_ids.map((_, place) => {
      const outcome = round.decisions[place]?.outcome ?? "NOT_REACHED";
      const kept = round.start_length + place < round.keep_length;
      if (outcome === "REJECTED") return "rejected";
      if (!WITH_ACCEPTANCE.has(outcome)) return "unreached";
      if (!kept) return "rolledBack";
      return outcome === "EXACT" ? "exact" : "loose";
    });
    for (const fate of fates) counts[fate] += 1;
    const steps = drafted ? 1 : Math.max(1, round.keep_length - round.start_length + 1);
    return { ...round, index, drafted, steps, ...counts, fates };
  });
  for (const round of counted) {
    const start = round.start_length - promptLength;
    const end = round.keep_length - promptLength;
    for (const owner of owners.splice(Math.max(0, Math.min(start, end)))) {
      if (!owner || owner.draft === null) continue;
      const earlier = counted[owner.round];
      earlier[earlier.fates[owner.draft]] -= 1;
      earlier.rolledBack += 1;
      earlier.fates[owner.draft] = "rolledBack";
    }
    for (let place = 0; start + place < end; place += 1) {
      owners[start + place] = { round: round.index, draft: place < round.drafted ? place : null };
    }
    owners[end] = { round: round.index, draft: null };
  }
  tokens.forEach((token, index) => {
    token.round = owners[index]?.round ?? null;
    token.draft = owners[index]?.draft ?? null;
  });
  return counted;
}
