"""Decides rounds once their inquiries are answered: each by itself on a CPU, else all together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import ParamSpec

import torch

from flyspec.engine.logits import token_logprobs
from flyspec.engine.sampling import checked, is_array
from flyspec.values.rounds import Verdict
from flyspec.values.tokens import TokenLogprobs
from verify_service.rules.batch_pass import MOST_LOGITS, BatchPass, Readings
from verify_service.rules.criteria import Evidence, Measure
from verify_service.rules.inquiry import THREE_LOGITS, Answers, Inquiry, PendingVerdict, top_tokens

P = ParamSpec("P")


class LazyAnswers:
    """The answers to one inquiry. Raises what `process_logits` raises."""

    __slots__ = ("_evidence", "_found", "_inquiry", "_processed")

    def __init__(self, inquiry: Inquiry) -> None:
        self._inquiry = inquiry
        self._processed = inquiry.round.processed()
        self._found: dict[tuple[Measure, int], Sequence[float]] = {}
        self._evidence: dict[int, Evidence] = {}  # measures of an index share its tensors

    def tokens(self, stream: int, first: int, stop: int) -> list[int]:
        chosen = self._inquiry.round.choose(self._processed, first, stop, stream)
        return checked(chosen.tolist())

    def numbers(self, measure: Measure, index: int) -> Sequence[float]:
        found = self._found.get((measure, index))
        if found is None:
            found = self._found[measure, index] = self._measure(measure, index)
        return found

    def logprobs(self, first: int, token_ids: Sequence[int]) -> list[TokenLogprobs]:
        rows = self._inquiry.round.logits[first : first + len(token_ids)]
        return token_logprobs(rows, token_ids, self._inquiry.top_logprobs or 0)

    def top_tokens(self) -> list[int]:
        top: list[int] = top_tokens(self._inquiry.round.logits, self._inquiry).flatten().tolist()
        return top

    def _measure(self, measure: Measure, index: int) -> Sequence[float]:
        round_, processed = self._inquiry.round, self._processed
        if measure is THREE_LOGITS and is_array(round_.logits) and is_array(processed):
            # Far cheaper than through tensors.
            raw, draft = round_.logits.numpy()[index], round_.drafts[index]
            return float(raw.max()), float(raw[draft]), float(processed.numpy()[index, draft])
        if index not in self._evidence:
            self._evidence[index] = round_.evidence(processed, index, index + 1)
        numbers: list[float] = measure.measure(self._evidence[index])[0].tolist()
        return numbers


def decide_all(
    prepared: Sequence[PendingVerdict], at_once: bool | None = None
) -> list[Verdict | Exception]:
    """Return each round's verdict, or the error that it alone fails with.

    All logits are on one device. `at_once` computes all that may be needed and reads it in one
    transfer; the default is to do so except on a CPU.
    """
    if at_once is None:
        at_once = any(pending.inquiry.round.logits.device.type != "cpu" for pending in prepared)
    inquiries = [pending.inquiry for pending in prepared]
    answers = answer_together(inquiries) if at_once else [None] * len(prepared)
    found: list[Verdict | Exception] = []
    for pending, answer in zip(prepared, answers, strict=True):
        if isinstance(answer, Exception):
            found.append(answer)
            continue
        try:
            found.append(pending.decide(answer or LazyAnswers(pending.inquiry)))
        except Exception as error:
            found.append(error)
    return found


def alone(prepare: Callable[P, PendingVerdict]) -> Callable[P, Verdict]:
    """Turn a first half into a function of the same arguments that returns or raises at once."""

    @wraps(prepare)
    def judge(*args: P.args, **kwargs: P.kwargs) -> Verdict:
        (found,) = decide_all([prepare(*args, **kwargs)])
        if isinstance(found, Exception):
            raise found
        return found

    return judge


@torch.inference_mode()
def answer_together(inquiries: Sequence[Inquiry]) -> Sequence[Answers | Exception]:
    """Return the answers to each inquiry, or what prevents them.

    Nothing depends on what the logits are, so that all is queued behind the forward that computes
    them; then everything is read in one transfer.
    """
    readings = Readings()
    found: dict[int, Answers | Exception] = {}
    for members in _passes(inquiries):
        one = BatchPass([inquiries[i] for i in members], readings)
        one.run()
        found.update(zip(members, one.found, strict=True))
    readings.read()
    return [found[i] for i in range(len(inquiries))]


def _passes(inquiries: Sequence[Inquiry]) -> Iterator[list[int]]:
    """Divide inquiries by kind, and those of a kind by size."""
    kinds: dict[object, list[int]] = {}
    for index, inquiry in enumerate(inquiries):
        kinds.setdefault(BatchPass.kind(inquiry), []).append(index)
    for members in kinds.values():
        part, size = list[int](), 0
        for index in members:
            more = inquiries[index].round.logits.numel()
            if part and size + more > MOST_LOGITS:
                yield part
                part, size = [], 0
            part.append(index)
            size += more
        yield part
