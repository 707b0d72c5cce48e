"""What a drafter may send: every message is held against what was asked, while it arrives.

A drafter that lies costs its own work and nobody else's: what breaks a rule here is a
`DrafterFaultError`, which counts against the drafter and never reaches a client. Pure: times and
sizes are told.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple, NoReturn

from flyspec.errors import UnavailableError
from flyspec.ranges import Range
from flyspec.values.admin import DraftServiceInfo
from flyspec.values.rounds import DraftAdvance, DraftChunk, DraftOpen, DraftTimings
from flyspec.values.tokens import Origin, TokenDistribution
from orchestrator.upstreams.half_floats import (
    IMPOSSIBLE,
    all_impossible,
    any_impossible,
    are_log_probs,
)


class DraftFault(StrEnum):
    """What a drafter did that none may do."""

    UNREADABLE = "unreadable"
    """Bytes that are no message, lists that do not go together."""
    SIZE = "size"
    """A message larger than any answer to the question."""
    STATUS = "status"
    """An end of the stream that nothing here led to."""
    ROUND = "round"
    """An answer to a question that was not asked, or not asked again."""
    POSITION = "position"
    """Tokens that follow another sequence, or come out of order."""
    CHUNKS = "chunks"
    """A piece with nothing in it that is not the last."""
    TOKENS = "tokens"
    """More tokens than were asked for."""
    VOCABULARY = "vocabulary"
    """Ids that its vocabulary does not have."""
    ORIGINS = "origins"
    """Tokens from where no draft comes from."""
    DISTRIBUTIONS = "distributions"
    """Distributions that were not asked for, are missing, or are none."""
    CONFIDENCES = "confidences"
    """Probabilities that are none, or of some of the tokens."""
    AGREEMENTS = "agreements"
    """Scores of tokens that it was not asked about."""
    TIMINGS = "timings"
    """Times longer than it took to answer."""
    DESCRIPTION = "description"
    """A description of itself that no draft service has."""


class DrafterFaultError(UnavailableError):
    """A drafter sent what it must not; the message says what was asked and what came."""

    def __init__(self, fault: DraftFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class DraftLimits(NamedTuple):
    """The most that drafters may send, whatever is asked; what was asked bounds the rest."""

    message_bytes: int = 4 << 20
    """Larger ones are not read: a megabyte of distributions, or the largest single one."""
    answer_bytes: int = 256
    """Of a message, besides its tokens."""
    token_bytes: int = 48
    """Of a token, besides its distribution."""
    probability_bytes: int = 2
    """Of a token of the vocabulary in a distribution."""
    listed_bytes: int = 7
    """Of a token that a distribution lists: its id as well."""
    vocab_size: int = 1 << 21
    confidence: float = 1.001
    """1, and rounding."""
    clock_ns: int = 1_000_000
    """Longer by so much, and by 1 %, than the clock here saw: clocks differ."""
    origins: frozenset[Origin] = frozenset({Origin.EXACT_MODEL, Origin.EXACT_LOOKUP})
    drafters: Range = Range(1, 64)
    name: str = r"[A-Za-z0-9._-]{1,64}"
    max_speculative_tokens: Range = Range(1, 1024)


LIMITS = DraftLimits()
LAWFUL_ENDS = frozenset({
    "UNAVAILABLE", "DEADLINE_EXCEEDED",  # it drains or is lost; it heard nothing for long
    "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED",  # cannot draft for this sequence, or now
})  # fmt: skip
"""Statuses that a draft stream may end with; also FAILED_PRECONDITION, to the first question: a
service that was restarted does not know the target's tokenizer."""

_NO_TIMINGS = DraftTimings()


class Answer:
    """The answer to one question, put together from its messages: `proposal` once `complete`.

    It follows a sequence that ends with `next_token_id`; `sent_ns` is when it was asked for.
    """

    __slots__ = ("_next_token_id", "_open", "_request", "_sent_ns", "complete", "proposal")

    def __init__(
        self, request: DraftAdvance, open_: DraftOpen, next_token_id: int, sent_ns: int
    ) -> None:
        self._request, self._open = request, open_
        self._next_token_id, self._sent_ns = next_token_id, sent_ns
        start = request.keep_length + len(request.append_token_ids)
        self.proposal = DraftChunk(start_position=start, last=False)
        self.complete = False

    @property
    def round_id(self) -> int:
        """That of the question."""
        return self._request.round_id

    @property
    def _left(self) -> int:
        return self._request.max_tokens - len(self.proposal.token_ids)

    def check_size(self, num_bytes: int) -> None:
        """Refuse a message before its lists are read. Raises `DrafterFaultError`."""
        limits, open_ = LIMITS, self._open
        token = limits.token_bytes
        if spec := open_.distribution:
            size = open_.drafter_vocab_size or limits.vocab_size
            whole = limits.probability_bytes * size  # longer than the lists that stand for it
            token += limits.listed_bytes * spec.top_k or whole
        most = limits.answer_bytes + self._left * token + len(self._request.append_token_ids)
        if num_bytes > most:
            self.refuse(DraftFault.SIZE, f"a message of {num_bytes} bytes, {most} at most")

    def add(self, chunk: DraftChunk, now_ns: int) -> None:
        """Take the next piece. Raises `DrafterFaultError`."""
        self._check_place(chunk)
        self._check_tokens(chunk)
        self._check_confidences(chunk)
        self._check_timings(chunk, now_ns - self._sent_ns)
        self._check_distributions(chunk)
        if max(chunk.confidences, default=0.0) > 1.0:
            chunk = replace(chunk, confidences=[min(c, 1.0) for c in chunk.confidences])
        self.proposal = self.proposal.joined(chunk)
        self.complete = chunk.last

    def _check_place(self, chunk: DraftChunk) -> None:
        """Whether it answers this question, and goes on where the last piece ended."""
        drafted = self.proposal
        if chunk.round_id != self.round_id:
            self.refuse(DraftFault.ROUND, f"an answer to round {chunk.round_id}")
        begins = drafted.start_position
        # A draft model with fewer ids than the target has another one stand for what it lacks.
        stands_in = chunk.next_token_id < self._next_token_id >= self._open.drafter_vocab_size
        if chunk.keep_length != begins - 1 or not (
            chunk.next_token_id == self._next_token_id or stands_in
        ):
            self.refuse(
                DraftFault.POSITION,
                f"tokens that follow {chunk.keep_length} and then {chunk.next_token_id}, not "
                f"{begins - 1} and then {self._next_token_id}",
            )
        expected = begins + len(drafted.token_ids)
        if chunk.start_position != expected:
            self.refuse(
                DraftFault.POSITION, f"position {chunk.start_position}, {expected} comes next"
            )
        if not chunk.token_ids and not chunk.last:
            self.refuse(DraftFault.CHUNKS, "a piece with no token that is not the last")

    def _check_tokens(self, chunk: DraftChunk) -> None:
        """Number, ids and origins."""
        if len(chunk.token_ids) > self._left:
            self.refuse(DraftFault.TOKENS, f"{len(chunk.token_ids)} tokens, {self._left} are left")
        size = self._open.drafter_vocab_size or LIMITS.vocab_size
        if max(chunk.token_ids, default=0) >= size:
            self.refuse(DraftFault.VOCABULARY, f"id {max(chunk.token_ids)}, there are {size}")
        if not LIMITS.origins.issuperset(chunk.origins):
            names = ", ".join(sorted({Origin(o).name for o in chunk.origins}))
            self.refuse(DraftFault.ORIGINS, f"origins {names}")

    def _check_confidences(self, chunk: DraftChunk) -> None:
        """What it holds of its tokens, and of those that are appended."""
        drafted = self.proposal
        for confidence in chunk.confidences:
            if not 0.0 <= confidence <= LIMITS.confidence:  # NaN too
                self.refuse(DraftFault.CONFIDENCES, f"confidence {confidence:g}")
        known = len(drafted.confidences) + len(chunk.confidences)
        if known not in (0, len(drafted.token_ids) + len(chunk.token_ids)):
            self.refuse(DraftFault.CONFIDENCES, f"confidences of {known} tokens, not of all")
        scored = len(self._request.append_token_ids) if self._request.score else 0
        count = len(chunk.agreements)
        if count > (0 if drafted.token_ids else scored):
            self.refuse(DraftFault.AGREEMENTS, f"scores of {count} tokens, of {scored} in all")

    def _check_timings(self, chunk: DraftChunk, elapsed_ns: int) -> None:
        """Times within what passed here, in the last piece."""
        times = chunk.timings
        most = elapsed_ns + elapsed_ns // 100 + LIMITS.clock_ns if chunk.last else 0
        if times != _NO_TIMINGS and (
            times.service_ns > most or max(times.queue_ns, times.model_ns) > times.service_ns
        ):
            self.refuse(
                DraftFault.TIMINGS,
                f"{times.queue_ns} ns in its queue and {times.model_ns} ns in its model of "
                f"{times.service_ns} ns, within {elapsed_ns} ns",
            )

    def _check_distributions(self, chunk: DraftChunk) -> None:
        wanted = len(chunk.token_ids) if self._open.distribution else 0
        if len(chunk.distributions) != wanted:
            self.refuse(
                DraftFault.DISTRIBUTIONS,
                f"{len(chunk.distributions)} distributions, {wanted} were asked for: run the same "
                "release of both",
            )
        for token_id, distribution in zip(chunk.token_ids, chunk.distributions, strict=False):
            if objection := self._objection(distribution, token_id):
                self.refuse(DraftFault.DISTRIBUTIONS, objection)

    def _objection(self, distribution: TokenDistribution, token_id: int) -> str:
        """What is wrong with a distribution that `token_id` came of; empty if nothing is."""
        log_probs, ids = distribution
        spec, vocab_size = self._open.distribution, self._open.drafter_vocab_size
        assert spec is not None
        if not log_probs and not ids:
            return ""
        size = len(ids) or vocab_size or len(log_probs) // 2
        if bool(ids) != bool(spec.top_k) and not (ids and spec.draw_from_it):
            form = "a list of tokens" if ids else "the whole vocabulary"
            return f"{form}, top_k is {spec.top_k}"
        if len(ids) > (spec.top_k or size) or len(log_probs) != 2 * size:
            return f"{len(log_probs)} bytes of log-probabilities, {len(ids)} ids listed"
        if ids and (max(ids) >= (vocab_size or LIMITS.vocab_size) or len(set(ids)) < len(ids)):
            return "ids listed twice, or that there are not"
        if not are_log_probs(log_probs):
            return "NaN, or a log-probability above 0"
        if all_impossible(log_probs) or (ids and any_impossible(log_probs)):
            return "a probability of 0 for a token that is listed, or for all"
        if spec.draw_from_it:
            index = ids.index(token_id) if token_id in ids else -1 if ids else token_id
            if index < 0 or log_probs[2 * index : 2 * index + 2] == IMPOSSIBLE:
                return f"probability 0 for {token_id}, which was drawn from it"
        return ""

    def check_end(self, status: str, details: str, is_first: bool) -> None:
        """Refuse an end of the stream that no drafter's has; `is_first`: it never answered before.

        `OK` is for a drafter that ends it of its own accord. Raises `DrafterFaultError`.
        """
        if status == "RESOURCE_EXHAUSTED" and "larger than max" in details:  # says gRPC here
            self.refuse(DraftFault.SIZE, f"a message beyond all bounds ({details})")
        if status not in LAWFUL_ENDS and not (status == "FAILED_PRECONDITION" and is_first):
            self.refuse(DraftFault.STATUS, f"the end of the stream, {status} ({details})")

    def refuse(self, fault: DraftFault, came: str) -> NoReturn:
        """Say what came, and what was asked. Raises `DrafterFaultError`."""
        request, spec = self._request, self._open.distribution
        also = "".join((
            f", scores of {len(request.append_token_ids)}" if request.score else "",
            f", distributions (top_k {spec.top_k})" if spec else "",
        ))  # fmt: skip
        raise DrafterFaultError(
            fault,
            f"sent {came}; asked for at most {request.max_tokens} tokens at position "
            f"{self.proposal.start_position} in round {request.round_id}{also}",
        )


def check_description(info: DraftServiceInfo) -> None:
    """Refuse what no draft service says of itself. Raises `DrafterFaultError`."""
    limits, names = LIMITS, [drafter.name for drafter in info.drafters]
    for what, value, range_ in (
        ("drafters", len(names), limits.drafters),
        ("max_speculative_tokens", info.max_speculative_tokens, limits.max_speculative_tokens),
        *(("vocab_size", d.model.vocab_size, Range(1, limits.vocab_size))
          for d in info.drafters if d.model),
    ):  # fmt: skip
        if value not in range_:
            raise DrafterFaultError(
                DraftFault.DESCRIPTION, f"describes itself with {what} {value}, {range_} may be"
            )
    if len(set(names)) < len(names) or not all(re.fullmatch(limits.name, n) for n in names):
        raise DrafterFaultError(
            DraftFault.DESCRIPTION, f"describes drafters by the names {names!r:.200}"
        )
