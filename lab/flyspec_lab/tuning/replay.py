"""Judges a recording by any rule, without a model.

Each recorded round is judged by the verify service's own judge, on logits rebuilt from the record:
those beyond the largest are taken for equal, which changes entropies a little and no token. What
replay cannot know is the text after a mismatch that a rule accepts. It supposes that what follows
is like the target's own text: the next rounds are those that follow the target's text, and a text
is right if each of its accepted mismatches, put in alone, leaves it right.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flyspec.engine.distributions import Distributions
from flyspec.rules import Divergence, Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.rounds import Outcome
from flyspec.values.tokens import SamplingParams
from flyspec_lab.tuning.recording import RecordedRound, TuningRecord
from verify_service.rules import judge
from verify_service.rules.criteria.draft import FORMULAS, comparable

Floats = NDArray[np.float64]
_GREEDY = SamplingParams()


@dataclass(frozen=True)
class Replayed:
    """A rule over a recording; arrays are by text.

    `num_rounds` and `num_tokens` are of the recorded rounds, as this rule would have ended them.
    `changes` is the expected change of the text's score, `flips` whether any accepted mismatch
    takes a right answer away.
    """

    rule: Rule
    num_rounds: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    scores: Floats
    changes: Floats
    flips: NDArray[np.bool_]

    @property
    def tokens_per_round(self) -> float:
        return float(self.num_tokens.sum() / max(1, self.num_rounds.sum()))

    @property
    def recovery(self) -> float:
        """Expected score relative to the target's own texts'."""
        total = float(self.scores.sum())
        return 1.0 + float(self.changes.sum()) / total if total else 1.0


class RuleReplay:
    """A recording, ready to be judged by many rules."""

    def __init__(self, recording: TuningRecord) -> None:
        self.recording = recording
        info = recording.info
        self._settled = [bool(_matches(r).all()) for r in recording.rounds]
        self.logits = functools.cache(lambda i: rebuilt(recording.rounds[i], info.vocab_size))

    def by(self, rule: Rule) -> Replayed:
        """Judge all rounds by a rule.

        It may neither read hidden rows nor compare whole distributions, which are not recorded.
        """
        recording = self.recording
        resolved = resolve_rule(rule, recording.info.num_speculative_tokens)
        count = len(recording.texts)
        rounds, tokens = np.zeros(count, np.int64), np.zeros(count, np.int64)
        own_tokens = np.array([max(1, t.num_tokens - 1) for t in recording.texts])
        changes, flips = np.zeros(count), np.zeros(count, np.bool_)
        for index, round_ in enumerate(recording.rounds):
            text = recording.texts[round_.text]
            accepted, last_loose = self._judge(index, resolved)
            rounds[round_.text] += 1
            tokens[round_.text] += min(accepted + 1, text.num_tokens - round_.start)
            if last_loose is not None:
                fork = round_.fork_scores[last_loose]
                change = -text.score if np.isnan(fork) else float(fork) - text.score
                changes[round_.text] += change
                flips[round_.text] |= change < 0
        # Longer rounds are fewer: the recorded ones are those of exact decoding.
        weights = np.minimum(1.0, own_tokens / np.maximum(1, tokens))
        scores = np.array([text.score for text in recording.texts])
        changes = np.clip(changes * weights, -scores, 1.0 - scores)
        return Replayed(resolved, rounds, tokens, scores, changes, flips)

    def _judge(self, index: int, rule: Rule) -> tuple[int, int | None]:
        """Return the number of accepted drafts of a round, and the last one accepted loosely."""
        round_ = self.recording.rounds[index]
        if self._settled[index]:
            return len(round_.draft_token_ids), None
        info = self.recording.info
        compares = distribution_spec(rule, _GREEDY) is not None
        verdict = judge(
            rule,
            round_.draft_token_ids,
            self.logits(index),
            start_position=self.recording.texts[round_.text].prompt_length + round_.start,
            eos_token_ids=info.eos_token_ids,
            control_token_ids=info.control_token_ids,
            draft_distributions=distributions_of(round_) if compares else None,
        )
        loose = [
            i
            for i, d in enumerate(verdict.decisions[: verdict.num_accepted])
            if d.outcome in (Outcome.LOOSE, Outcome.PROVISIONAL)
        ]
        return verdict.num_accepted, loose[-1] if loose else None


@dataclass(frozen=True)
class DraftedDivergences:
    """The JS divergence at each drafted position, and whether the draft is the target's own token.

    Positions after a round's first mismatch count as well: there both models go on from the draft.
    """

    values: Floats
    matches: NDArray[np.bool_]


def drafted_divergences(recording: TuningRecord) -> DraftedDivergences:
    """Return a recording's divergences, as the rule `fuzzy` compares distributions.

    That is at temperature 1, over the draft's most likely tokens and one bucket for the rest.
    """
    values, matches = [np.empty(0)], [np.empty(0, np.bool_)]
    for round_ in recording.rounds:
        logits = rebuilt(round_, recording.info.vocab_size)[:-1]
        compared = comparable(logits, distributions_of(round_), 0)
        divergence = FORMULAS[Divergence.JS](*compared)
        values.append(divergence.clamp_(min=0.0).double().numpy(force=True))
        matches.append(_matches(round_))
    return DraftedDivergences(np.concatenate(values), np.concatenate(matches))


def rebuilt(round_: RecordedRound, vocab_size: int) -> Tensor:
    """Return logits [n + 1, vocab] with the recorded ones, and equal ones for the rest."""
    logits = torch.from_numpy(round_.logits)
    rest = torch.from_numpy(round_.log_totals).double().exp() - logits.double().exp().sum(dim=-1)
    others = vocab_size - logits.shape[-1]
    level = (rest.clamp_min(0.0) / max(1, others)).log().clamp_max(logits[:, -1].double())
    full = level.float()[:, None].expand(-1, vocab_size).clone()
    return full.scatter_(1, torch.from_numpy(round_.logit_ids).long(), logits)


def distributions_of(round_: RecordedRound) -> Distributions:
    return Distributions(
        torch.from_numpy(round_.draft_log_probs).float(),
        torch.from_numpy(round_.draft_ids).long(),
    )


def _matches(round_: RecordedRound) -> NDArray[np.bool_]:
    """True if each draft is the target's own token."""
    found: NDArray[np.bool_] = round_.logit_ids[:-1, 0] == np.array(round_.draft_token_ids)
    return found
