"""Audits recordings: follows the rounds, judges them again, and weighs what differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from flyspec.client.recordings import RecordedLine
from flyspec.errors import InvalidArgumentError
from flyspec.flags import Dtype
from flyspec.validation import common_distribution_spec
from flyspec.values.admin import BATCH_INVARIANT
from flyspec.values.generation import Recording
from flyspec.values.rounds import Outcome
from flyspec_lab.audit.comparing import (
    SIGNIFICANT,
    TOLERANCE,
    NumberPair,
    RoundComparison,
    chance_of_rounding,
    compare,
    first_misdrawn,
    within_rounding,
)
from flyspec_lab.audit.report import AuditReport, Discrepancy, DiscrepancyKind, Reason
from flyspec_lab.audit.retelling import RetoldRound, retell
from flyspec_lab.audit.target import AuditedTarget, ReadRound

NATIVE = "native step"
"""Mark of the native step's numerics."""
MANY = 3
"""Tokens whose numbers differ, from which on the weights are to blame; rounds whose own tokens
differ although numbers agree, from which on the seed is."""


class TokenScore(NamedTuple):
    """A token's raw log-probability under the target, and the largest raw logit there."""

    logprob: float
    scale: float


Scores = dict[tuple[int, int], TokenScore]
"""By absolute position and token."""
Load = Callable[[Dtype, bool], AuditedTarget]
"""Loads the same weights in another data type; with the native step, if the flag is set."""


@dataclass
class Rejudged:
    """A recording's rounds, judged again: the first discrepancy of each round that has one.

    `ties` counts rows of logits that give what is recorded only within rounding.
    """

    discrepancies: list[Discrepancy] = field(default_factory=list)
    numbers: list[NumberPair] = field(default_factory=list)
    scores: Scores = field(default_factory=dict)
    ties: int = 0


@dataclass
class Auditor:
    """Audits recordings against one target.

    `load` is needed to measure rounding, where half precision was computed elsewhere. It is called
    when first needed; without it, nothing is measured.
    """

    target: AuditedTarget
    load: Load | None = None
    _loaded: dict[tuple[Dtype, bool], AuditedTarget] = field(default_factory=dict, init=False)

    def audit(self, line: RecordedLine) -> AuditReport:
        """Audit one recording. Raises `InvalidArgumentError` if the target cannot read it."""
        recording, target = line.recording, self.target
        started = recording.started
        try:
            told = retell(recording, target.tokenizer)
            tolerance = self.tolerance(recording)
            judged = self._judge(recording, told.rounds, tolerance)
            numbers = [*judged.numbers, *_logprob_pairs(recording, judged.scores)]
            p_value = self._p_value(recording, told.rounds, judged.scores) if tolerance else None
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{line.where}: {error}") from None
        differing = [pair for pair in numbers if pair.differs(tolerance)]
        found = [told.discrepancy] if told.discrepancy else []
        found += [*judged.discrepancies, *(pair.discrepancy for pair in differing)]
        # Of several at a token the most telling one.
        order = [*DiscrepancyKind]
        first = min(found, key=lambda d: (d.token_index, order.index(d.kind)), default=None)
        ids = recording.output.token_ids
        if first is not None and first.token_index < len(ids):
            text = target.tokenizer.bytes_of(ids[first.token_index]).decode(errors="replace")
            first = replace(first, token_text=text)
        noisy = p_value is not None and p_value < SIGNIFICANT
        weights = started.weights_fingerprint in ("", target.info.weights_fingerprint)
        return AuditReport(
            where=line.where,
            follows=first is None and not noisy,
            num_tokens=len(ids),
            num_rounds=len(recording.rounds),
            rule=started.rules,
            seed=started.seed,
            discrepancy=first,
            reason=_reason(first, judged, numbers, differing, noisy),
            num_numbers=len(numbers),
            num_differing=len(differing),
            largest_difference_nats=max((pair.difference for pair in numbers), default=0.0),
            tolerance_nats=tolerance * max((pair.scale for pair in numbers), default=0.0),
            num_ties=judged.ties,
            p_value=p_value,
            weights_agree=weights,
            numerics_agree=started.numerics == target.info.numerics,
            notes=self._notes(recording, weights),
        )

    def tolerance(self, recording: Recording) -> float:
        """Return by what share of the largest logit numbers may differ: 0 for the same bits.

        Bits are the same where numerics agree and do not depend on what else is in a step.
        """
        then, now = recording.started.numerics, self.target.info.numerics
        if then == now and BATCH_INVARIANT in now and not recording.completion.mixed_numerics:
            return 0.0
        dtypes = {_dtype_of(recording), self.target.info.dtype}
        return max(TOLERANCE.get(dtype, TOLERANCE["bfloat16"]) for dtype in dtypes)

    def _judge(
        self, recording: Recording, rounds: Sequence[RetoldRound], tolerance: float
    ) -> Rejudged:
        """Judge all rounds from their recorded state, whatever earlier ones turned out to be."""
        started, target, judged = recording.started, self.target, Rejudged()
        length = len(started.prompt_token_ids)
        spec = common_distribution_spec(started.rules_by_index, started.sampling)
        drawn_from = spec is not None and spec.draw_from_it
        for group in target.read(rounds):
            _score(target, group, judged.scores)
            verdicts = target.judge(recording, group)
            for read, verdict in zip(group, verdicts, strict=True):
                scales = read.rows.abs().amax(dim=-1).tolist()
                found = compare(read.round, verdict, length, scales)
                if found.discrepancy is not None and tolerance:
                    found = self._repaired(recording, read, found, tolerance, judged)
                judged.numbers += found.numbers
                misdrawn = first_misdrawn(read.round, length, started.seed, drawn_from)
                both = [each for each in (misdrawn, found.discrepancy) if each is not None]
                if misdrawn is not None and isinstance(verdict, Exception):
                    both = [misdrawn]  # why it cannot be judged
                judged.discrepancies += sorted(both, key=lambda each: each.token_index)[:1]
        return judged

    def _repaired(
        self,
        recording: Recording,
        read: ReadRound,
        first: RoundComparison,
        tolerance: float,
        judged: Rejudged,
    ) -> RoundComparison:
        """Return a round's comparison after near-ties have gone the recorded way."""
        length = len(recording.started.prompt_token_ids)
        scales = read.rows.abs().amax(dim=-1).tolist()

        def rejudge(rows: Tensor) -> RoundComparison:
            (verdict,) = self.target.judge(recording, [read._replace(rows=rows)])
            return compare(read.round, verdict, length, scales)

        found, ties = within_rounding(
            read.rows, read.round.read_token_ids, first, tolerance, rejudge
        )
        judged.ties += len(ties)
        begin = len(read.round.prefix) - length
        # Numbers of changed rows are no longer the target's.
        kept = [pair for pair in found.numbers if pair.token_index - begin not in ties]
        return found._replace(numbers=kept)

    def _p_value(
        self, recording: Recording, rounds: Sequence[RetoldRound], own: Scores
    ) -> float | None:
        """Return the chance of the log-probabilities by rounding alone, where that is measured.

        The yardstick rounds as the recording's engine does: transformers' modules round logits to
        half precision, the native step does not.
        """
        dtype = _dtype_of(recording)
        if self.load is None or dtype not in ("bfloat16", "float16"):
            return None
        if not recording.output.logprobs:
            return None
        native = NATIVE in recording.started.numerics
        if native != (NATIVE in self.target.info.numerics) or dtype != self.target.info.dtype:
            own = self._scores(rounds, dtype, native)
        reference = self._scores(rounds, "float32", False)
        yardstick, exact = (_logprob_pairs(recording, each) for each in (own, reference))
        return chance_of_rounding(
            [pair.recorded for pair in exact],
            [pair.own for pair in yardstick],
            [pair.own for pair in exact],
        )

    def _scores(self, rounds: Sequence[RetoldRound], dtype: Dtype, native: bool) -> Scores:
        """Return the scores of the same weights computed otherwise."""
        assert self.load is not None
        if (dtype, native) not in self._loaded:
            self._loaded[dtype, native] = self.load(dtype, native)
        other, scores = self._loaded[dtype, native], Scores()
        for group in other.read(rounds):
            _score(other, group, scores)
        return scores

    def _notes(self, recording: Recording, weights_agree: bool) -> list[str]:
        started, info, notes = recording.started, self.target.info, []
        if not weights_agree:
            notes.append(
                f"note: recorded on weights {started.weights_fingerprint} of {started.model}, "
                f"audited with {info.weights_fingerprint} of {info.name}"
            )
        if started.numerics != info.numerics:
            notes.append(
                f"note: recorded with {started.numerics or 'unknown numerics'}, audited with "
                f"{info.numerics}: the bits may differ"
            )
        if recording.completion.mixed_numerics:
            notes.append("note: targets that compute differently took part in it")
        if not recording.output.logprobs and recording.output.token_ids:
            notes.append("note: recorded without logprobs, by which other weights are told best")
        return notes


def _dtype_of(recording: Recording) -> Dtype:
    """Return the data type that a recording was made with: its numerics begin with it."""
    dtype: Dtype = recording.started.numerics.split(",")[0]  # type: ignore[assignment]
    return dtype if dtype in TOLERANCE else "bfloat16"


def _score(target: AuditedTarget, group: Sequence[ReadRound], scores: Scores) -> None:
    """Add the scores of the tokens that rounds leave, or may leave, in the output."""
    for round_, rows, _ in group:
        record, start = round_.record, len(round_.prefix)
        if record.keep_length < start:
            continue  # it only cut back
        tokens = [*round_.read_token_ids[: round_.num_kept], record.next_token_id]
        wanted = list(enumerate(tokens))
        for index, decision in enumerate(record.decisions):
            own = decision.target_token_id
            if decision.outcome is Outcome.PROVISIONAL and own is not None:
                wanted.append((index, own))
        at = rows[[index for index, _ in wanted]]
        scales = at.abs().amax(dim=-1).tolist()
        found = target.logprobs(at, [token for _, token in wanted])
        for (index, token), logprob, scale in zip(wanted, found, scales, strict=True):
            scores[start + index, token] = TokenScore(logprob, scale)


def _logprob_pairs(recording: Recording, scores: Scores) -> list[NumberPair]:
    """Return recorded log-probabilities of output tokens with the target's, where it has them."""
    length, output = len(recording.started.prompt_token_ids), recording.output
    return [
        NumberPair(index, "log-probability", told.logprob, *own)
        for index, (token, told) in enumerate(zip(output.token_ids, output.logprobs, strict=False))
        if (own := scores.get((length + index, token))) is not None
    ]


def _reason(
    found: Discrepancy | None,
    judged: Rejudged,
    numbers: Sequence[NumberPair],
    differing: Sequence[NumberPair],
    noisy: bool,
) -> Reason | None:
    """Return the likely reason of a failure; None if there is none.

    After an altered token, numbers differ too: those before it tell about the weights.
    """
    if found is not None and found.kind is not DiscrepancyKind.NUMBER:
        before = [pair for pair in numbers if pair.token_index < found.token_index]
        if before:
            differing = [pair for pair in differing if pair.token_index < found.token_index]
    if noisy or len({pair.token_index for pair in differing}) >= MANY:
        return Reason.OTHER_WEIGHTS
    if found is None:
        return None
    if found.kind is DiscrepancyKind.RECORD:
        altered = found.round_index is None or "token" in found.recorded
        return Reason.ALTERED if altered else Reason.INCONSISTENT
    if found.kind is DiscrepancyKind.NUMBER:
        return Reason.ALTERED_NUMBER
    if found.kind is DiscrepancyKind.DECISION:
        return Reason.OTHER_RULE
    others = [each for each in judged.discrepancies if each.kind is DiscrepancyKind.TOKEN]
    return Reason.OTHER_SEED if len(others) >= MANY else Reason.ALTERED
