"""Audits recordings: follows the rounds, judges them again, and weighs what differs.

Whether numbers differ by more than rounding is measured where they are rounded to half precision,
in which rounding is as large as what quantisation changes: by how far this machine's own numbers
are from those of the same weights in float32. Numbers of the same weights from elsewhere are as far
off on average; those of other weights are farther.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from torch import Tensor

from flyspec.client.recordings import RecordedLine
from flyspec.engine.logits import token_logprobs
from flyspec.errors import InvalidArgumentError
from flyspec.values.admin import BATCH_INVARIANT, ModelInfo
from flyspec.values.generation import Recording
from flyspec.values.rounds import Outcome
from flyspec_lab.audit.comparing import (
    TOLERANCE,
    NumberPair,
    RoundComparison,
    compare,
    within_rounding,
)
from flyspec_lab.audit.report import AuditReport, Discrepancy, DiscrepancyKind, Reason
from flyspec_lab.audit.retelling import RetoldRound, retell
from flyspec_lab.audit.target import AuditedTarget, ReadRound

NATIVE = "native step"
"""Mark of the native step's numerics: its logits are not rounded to half precision, torch's are."""
MANY = 3
"""Tokens whose numbers differ, from which on the weights are to blame; rounds whose own tokens
differ although numbers agree, from which on the seed is."""
FEWEST_NUMBERS = 16
"""Below this no sample of differences is significant enough."""
SIGNIFICANT = 1e-4
"""Chance of calling the same weights others."""

Scores = Mapping[tuple[int, int], tuple[float, float]]
"""Raw log-probability and the largest raw logit there, by absolute position and token."""


@dataclass
class Rejudged:
    """A recording's rounds, judged again: the first discrepancy of each round that has one.

    `num_ties` counts rows of logits that give what is recorded only within rounding.
    """

    discrepancies: list[Discrepancy] = field(default_factory=list)
    numbers: list[NumberPair] = field(default_factory=list)
    scores: dict[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    num_ties: int = 0


@dataclass
class Auditor:
    """Audits recordings against one target.

    `load_reference` loads the same weights in float32, to measure rounding by. It is called when
    first needed; without it, nothing is measured.
    """

    target: AuditedTarget
    load_reference: Callable[[], AuditedTarget] | None = None
    _excesses: list[float] = field(default_factory=list, init=False)

    def audit(self, line: RecordedLine) -> AuditReport:
        """Audit one recording. Raises `InvalidArgumentError` if the target cannot read it."""
        recording, local = line.recording, self.target.local
        started, tolerance = recording.started, self.tolerance(recording)
        try:
            rounds, contradiction = retell(recording, local.tokenizer)
            judged = self._judge(recording, rounds, tolerance)
            pairs = _logprob_pairs(recording, judged.scores)
            if tolerance:
                self._excesses += self._excess(recording, rounds, pairs)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{line.where}: {error}") from None
        numbers = [*judged.numbers, *pairs]
        differing = [pair for pair in numbers if pair.differs(tolerance)]
        found = [contradiction] if contradiction else []
        found += [*judged.discrepancies, *(pair.discrepancy for pair in differing)]
        # Of several at a token the most telling one.
        order = [*DiscrepancyKind]
        first = min(found, key=lambda d: (d.token_index, order.index(d.kind)), default=None)
        return AuditReport(
            where=line.where,
            follows=first is None,
            num_tokens=len(recording.output.token_ids),
            num_rounds=len(recording.rounds),
            rule=started.rules,
            seed=started.seed,
            discrepancy=first,
            reason=_reason(first, judged.discrepancies, numbers, differing) if first else None,
            num_numbers=len(numbers),
            num_differing=len(differing),
            largest_difference_nats=max((pair.difference for pair in numbers), default=0.0),
            tolerance_nats=tolerance * max((pair.scale for pair in numbers), default=0.0),
            num_ties=judged.num_ties,
            notes=[*_notes(recording, local.info)],
        )

    def chance_of_rounding(self) -> float | None:
        """Return the chance that rounding alone puts the numbers of all recordings so far off.

        One-sided Wilcoxon signed-rank test of how much farther from the reference they are than
        the target's own; None for too few numbers.
        """
        from scipy.stats import wilcoxon

        excesses = [excess for excess in self._excesses if excess and math.isfinite(excess)]
        if len(excesses) < FEWEST_NUMBERS:
            return None
        return float(wilcoxon(excesses, alternative="greater").pvalue)

    def tolerance(self, recording: Recording) -> float:
        """Return by what share of the largest logit numbers may differ: 0 for the same bits.

        Bits are the same where numerics agree and do not depend on what else is in a step.
        """
        then, now = recording.started.numerics, self.target.local.info.numerics
        if then == now and BATCH_INVARIANT in now and not recording.completion.mixed_numerics:
            return 0.0
        dtypes = _dtype_of(recording), self.target.local.info.dtype
        return max(TOLERANCE.get(dtype, TOLERANCE["bfloat16"]) for dtype in dtypes)

    def _judge(
        self, recording: Recording, rounds: Sequence[RetoldRound], tolerance: float
    ) -> Rejudged:
        """Judge all rounds from their recorded state, whatever earlier ones turned out to be."""
        judged, length = Rejudged(), len(recording.started.prompt_token_ids)
        for read in self.target.read(rounds):
            judged.scores.update(_scores(read))
            found = self._rejudged(recording, read, read.rows)
            if found.discrepancy is not None and tolerance:
                found, ties = within_rounding(
                    read.rows, read.round.read_token_ids, found, tolerance,
                    partial(self._rejudged, recording, read),
                )  # fmt: skip
                judged.num_ties += len(ties)
                changed = {len(read.round.prefix) - length + row for row in ties}
                # Numbers of changed rows are no longer the target's.
                kept = [pair for pair in found.numbers if pair.token_index not in changed]
                found = found._replace(numbers=kept)
            judged.numbers += found.numbers
            judged.discrepancies += [found.discrepancy] if found.discrepancy else []
        return judged

    def _rejudged(self, recording: Recording, read: ReadRound, rows: Tensor) -> RoundComparison:
        """Judge a round with these logits, and compare."""
        verdict = self.target.judge(recording, read._replace(rows=rows))
        length, scales = len(recording.started.prompt_token_ids), rows.abs().amax(dim=-1)
        return compare(read.round, verdict, length, scales.tolist())

    def _excess(
        self, recording: Recording, rounds: Sequence[RetoldRound], pairs: Sequence[NumberPair]
    ) -> Iterator[float]:
        """Yield how much farther recorded log-probabilities are from float32 than the target's own.

        Only where both are rounded alike, to half precision.
        """
        info, then = self.target.local.info, recording.started.numerics
        alike = info.dtype == _dtype_of(recording) and (NATIVE in then) == (NATIVE in info.numerics)
        if not alike or info.dtype not in ("bfloat16", "float16") or self.load_reference is None:
            return
        scores = {k: v for read in self._reference.read(rounds) for k, v in _scores(read)}
        for pair, exact in zip(pairs, _logprob_pairs(recording, scores), strict=True):
            yield abs(pair.recorded - exact.own) - abs(pair.own - exact.own)

    @cached_property
    def _reference(self) -> AuditedTarget:
        assert self.load_reference is not None
        return self.load_reference()


def _dtype_of(recording: Recording) -> str:
    """Return the data type that a recording was made with: its numerics begin with it."""
    dtype = recording.started.numerics.split(",")[0]
    return dtype if dtype in TOLERANCE else "bfloat16"


def _scores(read: ReadRound) -> Iterator[tuple[tuple[int, int], tuple[float, float]]]:
    """Yield the scores of the tokens that a round leaves, or may leave, in the output."""
    round_, rows, _ = read
    record, start = round_.record, len(round_.prefix)
    if record.keep_length < start:
        return  # it only cut back
    kept = round_.read_token_ids[: record.keep_length - start]
    wanted = [*enumerate([*kept, record.next_token_id])]
    for index, decision in enumerate(record.decisions):
        if decision.outcome is Outcome.PROVISIONAL and decision.target_token_id is not None:
            wanted.append((index, decision.target_token_id))
    at = rows[[index for index, _ in wanted]]
    entries = token_logprobs(at, [token for _, token in wanted], 0)
    for place, entry, scale in zip(wanted, entries, at.abs().amax(dim=-1).tolist(), strict=True):
        yield (start + place[0], place[1]), (entry.logprob, scale)


def _logprob_pairs(recording: Recording, scores: Scores) -> list[NumberPair]:
    """Return recorded log-probabilities of output tokens with the target's, where it has them."""
    length, output = len(recording.started.prompt_token_ids), recording.output
    return [
        NumberPair(index, "log-probability", told.logprob, *own)
        for index, (token, told) in enumerate(zip(output.token_ids, output.logprobs, strict=False))
        if (own := scores.get((length + index, token))) is not None
    ]


def _reason(
    found: Discrepancy,
    discrepancies: Sequence[Discrepancy],
    numbers: Sequence[NumberPair],
    differing: Sequence[NumberPair],
) -> Reason:
    """Return the likely reason of a failure.

    After an altered token, numbers differ too: those before it tell about the weights.
    """
    if found.kind is not DiscrepancyKind.NUMBER and any(
        pair.token_index < found.token_index for pair in numbers
    ):
        differing = [pair for pair in differing if pair.token_index < found.token_index]
    if len({pair.token_index for pair in differing}) >= MANY:
        return Reason.OTHER_WEIGHTS
    if found.kind is DiscrepancyKind.RECORD:
        altered = found.round_index is None or found.recorded.startswith("token")
        return Reason.ALTERED if altered else Reason.INCONSISTENT
    if found.kind is DiscrepancyKind.NUMBER:
        return Reason.ALTERED_NUMBER
    if found.kind is DiscrepancyKind.DECISION:
        return Reason.OTHER_RULE
    others = [each for each in discrepancies if each.kind is DiscrepancyKind.TOKEN]
    return Reason.OTHER_SEED if len(others) >= MANY else Reason.ALTERED


def _notes(recording: Recording, info: ModelInfo) -> Iterator[str]:
    started = recording.started
    if started.weights_fingerprint not in ("", info.weights_fingerprint):
        yield (
            f"recorded on weights {started.weights_fingerprint} of {started.model}, audited with "
            f"{info.weights_fingerprint} of {info.name}"
        )
    if started.numerics != info.numerics:
        yield (
            f"recorded with {started.numerics or 'unknown numerics'}, audited with "
            f"{info.numerics}: the bits may differ"
        )
    if recording.completion.mixed_numerics:
        yield "targets that compute differently took part in it"
    if not recording.output.logprobs and recording.output.token_ids:
        yield "recorded without logprobs, by which other weights are told best"
