"""What `flyspec tune` says: a row per rule, the choice, and everything for JSON."""

from __future__ import annotations

from typing import Any

from flyspec.tables import FittedTable, make_table
from flyspec_lab.compare import ConditionReport
from flyspec_lab.loss_bound import bounds_loss
from flyspec_lab.resplits import Resplits
from flyspec_lab.tuning.options import TuneOptions
from flyspec_lab.tuning.search import RuleCandidate
from flyspec_lab.tuning.tune import Tuned

_BOUND = (
    "sampled, loses ≤: fuzzy's bound N·%M_D·T on what the mean of a score from 0 to 1 loses "
    "(arXiv 2502.20704), with N tokens a text and the share %M_D of accepted drafts as recorded. "
    "It holds for total variation (tv) alone, and only where tokens are sampled from both models' "
    "distributions (temperature above 0); it says nothing of greedy texts, which the other columns "
    "are about, nor at 1 and above"
)


def axes_table(o: TuneOptions, found: Tuned) -> FittedTable:
    """Return each rule's loosest threshold that reaches the target, and the one certified."""
    columns = ["rule", "threshold", "value", "recovery", "at least", "lost", "tok/round"]
    bounded = any(bounds_loss(c.replayed.rule) for c in found.candidates)
    if bounded:
        columns.append("sampled, loses ≤")
    if found.certificates:
        columns.append(f"certified {o.certify_rate:.2%}")
    rows = []
    for axis in found.axes:
        best = found.best_of(axis, o.target_recovery)
        row = [axis.name, axis.parameter, *(("none", *[""] * 4) if best is None else _cells(best))]
        if bounded:
            bound = None if best is None else best.loss_bound
            row.append("" if bound is None else str(bound))
        if found.certificates:
            row.append(_value(found.certificates[axis.name][0]))
        rows.append(row)
    return make_table(columns, rows, left=2)


def _cells(candidate: RuleCandidate) -> list[str]:
    return [
        _value(candidate),
        f"{candidate.recovery:.1%}",
        f"{candidate.recovery_low:.1%}",
        str(candidate.num_flips),
        f"{candidate.tokens_per_round:.2f}",
    ]


def _value(candidate: RuleCandidate | None) -> str:
    return "none" if candidate is None or candidate.value is None else f"{candidate.value:g}"


def summary(o: TuneOptions, found: Tuned, confirmed: ConditionReport | None) -> list[str]:
    """Return lines about the recording, the choice, and what generating again gave."""
    recording, exact, chosen = found.recording, found.candidates[0], found.chosen
    size = o.recording.stat().st_size / max(1, recording.num_positions)
    lines = [
        f"{len(recording.texts)} problems of {recording.info.task}: "
        f"{recording.num_positions:,} positions, {size:.0f} bytes each",
        f"exact decoding: {exact.tokens_per_round:.2f} tokens a round",
    ]
    if chosen.value is None:
        lines.append(
            f"chosen: exact decoding; no threshold keeps {o.target_recovery:.1%} with confidence "
            f"{o.confidence:.0%} on these problems: record more, or ask for less"
        )
    else:
        lines.append(
            f"chosen: {chosen.axis}, threshold {chosen.value:g}: expected recovery "
            f"{chosen.recovery:.1%}, at least {chosen.recovery_low:.1%}; "
            f"{chosen.tokens_per_round:.2f} tokens a round"
        )
    if any(bounds_loss(c.replayed.rule) for c in found.candidates):
        lines.append(_BOUND)
    for axis, (_, certificate) in found.certificates.items():
        if certificate.problem:
            lines.append(f"not certified: {axis}: {certificate.problem}")
    if found.resplits is not None:
        lines += _resplit_lines(found.resplits)
    if confirmed is not None and confirmed.flips is not None and confirmed.recovery is not None:
        flips = confirmed.flips
        lines.append(
            f"generated again: {flips.harmful} of {flips.right_there} right answers lost, "
            f"{flips.helpful} gained; recovery {confirmed.recovery.value:.1%}, at least "
            f"{1 - flips.harmful_rate_upper:.1%} (95 %, as if none were gained); "
            f"{confirmed.mean_accepted_tokens:.2f} tokens a round"
        )
    if o.preset_file is not None:
        lines.append(f"wrote {o.preset_file}: serve it with --rules-file, and --rule {o.name}")
    return lines


def resplits_table(found: Resplits) -> FittedTable:
    """Return how each rule's certificates did in halves and redraws of the recording."""
    columns = ["rule", "above", "halves", "broken", "other half lost", "redraws", "broken"]
    rows = []
    for name, rule in found.rules.items():
        halves, redraws = (
            [str(of.certified), f"{of.broken} ({of.share:.1%})"]
            for of in (rule.halves, rule.redraws)
        )
        rate = "" if rule.held_out_rate is None else f"{rule.held_out_rate:.2%}"
        rows.append([name, str(rule.above), *halves, rate, *redraws])
    draws, risk = found.halves.draws, found.promise.shared(len(found.rules)).risk
    title = f"certified and broken, of {draws} each; a rule may break {risk:.2%}"
    return make_table(columns, rows, title, left=1)


def _resplit_lines(found: Resplits) -> list[str]:
    """Say how often any rule's certificate broke its promise."""
    sizes = {
        "halves": (found.halves, found.half_size),
        "redraws": (found.redraws, found.num_prompts),
    }
    lines = [
        f"{of.draws} {name} of {size} right answers: promise broken in {of.broken} "
        f"({of.share:.1%}, 95 % interval {of.low:.1%} to {of.high:.1%}; at most {of.risk:.1%} "
        f"promised); nothing certified in {of.draws - of.certified}"
        for name, (of, size) in sizes.items()
    ]
    if not any(rule.above for rule in found.rules.values()):
        lines.append(
            f"this shows nothing: no threshold loses more than {found.promise.max_rate:.2%} of "
            "the recorded right answers; check a lower --certify-rate"
        )
    elif not found.halves.certified:
        each = found.promise.shared(len(found.rules))
        lines.append(
            f"the halves show nothing: a certificate needs at least {each.min_prompts} right "
            "answers without a flip; record more problems, or name fewer --rules"
        )
    return lines


def document(o: TuneOptions, found: Tuned, confirmed: ConditionReport | None) -> dict[str, Any]:
    """Return everything for JSON."""
    return {
        **vars(o),
        "recording_info": found.recording.info,
        "num_positions": found.recording.num_positions,
        "candidates": [
            {
                "axis": c.axis,
                "value": c.value,
                "recovery": c.recovery,
                "recovery_low": c.recovery_low,
                "flips": c.num_flips,
                "tokens_per_round": c.tokens_per_round,
                "loss_bound": c.loss_bound and {**vars(c.loss_bound), "value": c.loss_bound.value},
            }
            for c in found.candidates
        ],
        "chosen": {"axis": found.chosen.axis, "value": found.chosen.value},
        "certificates": {
            axis: certificate for axis, (_, certificate) in found.certificates.items()
        },
        "broken_promises": found.resplits,
        "confirmed": confirmed,
    }
