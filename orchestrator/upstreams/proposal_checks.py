"""Validates a drafter's messages against the request as they arrive.

A misbehaving drafter harms only its own work: a violation raises `DrafterFaultError`, which counts
against the drafter and never reaches a client. Pure: times and sizes are passed in.
"""

from __future__ import annotations

import re
from dataclasses import replace
from enum import StrEnum
from typing import NamedTuple, NoReturn

from flyspec.draft_trees import check_parents, depths
from flyspec.errors import InvalidArgumentError, UnavailableError
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
    """Ways in which a drafter can violate the protocol."""

    UNREADABLE = "unreadable"
    """Bytes that are not a valid message, or inconsistent lists."""
    SIZE = "size"
    """A message larger than any valid answer to the request."""
    STATUS = "status"
    """An end of the stream without a valid reason."""
    ROUND = "round"
    """An answer to a request that was not made, or a second answer."""
    POSITION = "position"
    """Tokens that follow a different sequence or are out of order."""
    CHUNKS = "chunks"
    """An empty chunk that is not the last."""
    TOKENS = "tokens"
    """More tokens than requested."""
    VOCABULARY = "vocabulary"
    """Token IDs outside its vocabulary."""
    ORIGINS = "origins"
    """Origins that drafts cannot have."""
    DISTRIBUTIONS = "distributions"
    """Distributions that are unrequested, missing or invalid."""
    CONFIDENCES = "confidences"
    """Confidences that are not probabilities, or for some of the tokens only."""
    AGREEMENTS = "agreements"
    """Scores for tokens it was not asked to score."""
    TREE = "tree"
    """A tree that was not requested, or whose tokens follow none before them."""
    TIMINGS = "timings"
    """Times longer than the answer took."""
    DESCRIPTION = "description"
    """An invalid description of the service."""


class DrafterFaultError(UnavailableError):
    """A drafter violated the protocol; the message says what it sent and what was expected."""

    def __init__(self, fault: DraftFault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


class DraftLimits(NamedTuple):
    """Limits on what drafters may send, besides those that follow from the request."""

    message_bytes: int = 4 << 20
    """Maximum message size; fits a megabyte of distributions, or the largest single one."""
    answer_bytes: int = 256
    """Bytes of a message besides its tokens."""
    token_bytes: int = 48
    """Bytes per token besides its distribution."""
    probability_bytes: int = 2
    """Bytes per token of the vocabulary in a full distribution."""
    listed_bytes: int = 7
    """Bytes per token listed in a top-k distribution, including its ID."""
    vocab_size: int = 1 << 21
    confidence: float = 1.001
    """1 plus rounding."""
    clock_ns: int = 1_000_000
    """Tolerance for reported times, in addition to 1 %: clocks differ."""
    origins: frozenset[Origin] = frozenset({Origin.EXACT_MODEL, Origin.EXACT_LOOKUP})
    drafters: Range = Range(1, 64)
    name: str = r"[A-Za-z0-9._-]{1,64}"
    max_speculative_tokens: Range = Range(1, 1024)


LIMITS = DraftLimits()
LAWFUL_ENDS = frozenset({
    "UNAVAILABLE", "DEADLINE_EXCEEDED",  # draining or lost; idle for too long
    "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED",  # cannot draft for this sequence, or now
})  # fmt: skip
"""Statuses that may end a draft stream. FAILED_PRECONDITION may answer the first request, too: a
restarted service lacks the target's tokenizer."""

_NO_TIMINGS = DraftTimings()


class Answer:
    """The answer to one request, assembled from its chunks: `proposal`, once `complete`.

    It continues a sequence that ends with `next_token_id`; `sent_ns` is when the request was sent.
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
        return self._request.round_id

    @property
    def _left(self) -> int:
        request = self._request
        most = max(request.max_tokens, request.max_tree_tokens)
        return most - len(self.proposal.token_ids)

    @property
    def max_bytes(self) -> int:
        """Maximum size of its next message."""
        limits, open_ = LIMITS, self._open
        token = limits.token_bytes
        if spec := open_.distribution:
            size = open_.drafter_vocab_size or limits.vocab_size
            whole = limits.probability_bytes * size  # larger than lists sent in its place
            token += limits.listed_bytes * spec.top_k or whole
        return limits.answer_bytes + self._left * token + len(self._request.append_token_ids)

    def check_size(self, num_bytes: int, other: int = 0) -> None:
        """Check a message's size before decoding it; or it is another one, of up to `other` bytes.

        Raises `DrafterFaultError`.
        """
        most = max(self.max_bytes, other)
        if num_bytes > most:
            self.refuse(DraftFault.SIZE, f"a {num_bytes}-byte message, over the limit of {most}")

    def add(self, chunk: DraftChunk, now_ns: int) -> None:
        """Check and add the next chunk. Raises `DrafterFaultError`."""
        self._check_place(chunk)
        self._check_tokens(chunk)
        self._check_confidences(chunk)
        self._check_tree(chunk)
        self._check_timings(chunk, now_ns - self._sent_ns)
        self._check_distributions(chunk)
        if max(chunk.confidences, default=0.0) > 1.0:
            chunk = replace(chunk, confidences=[min(c, 1.0) for c in chunk.confidences])
        self.proposal = self.proposal.joined(chunk)
        self.complete = chunk.last

    def _check_place(self, chunk: DraftChunk) -> None:
        """Check that a chunk answers this request and continues the previous chunk."""
        drafted = self.proposal
        if chunk.round_id != self.round_id:
            self.refuse(DraftFault.ROUND, f"an answer for round {chunk.round_id}")
        begins = drafted.start_position
        # A draft model with a smaller vocabulary substitutes an ID of its own for one it lacks.
        stands_in = chunk.next_token_id < self._next_token_id >= self._open.drafter_vocab_size
        if chunk.keep_length != begins - 1 or not (
            chunk.next_token_id == self._next_token_id or stands_in
        ):
            self.refuse(
                DraftFault.POSITION,
                f"tokens that follow {chunk.keep_length} tokens and ID {chunk.next_token_id}, not "
                f"{begins - 1} tokens and ID {self._next_token_id}",
            )
        expected = begins + len(drafted.token_ids)
        if chunk.start_position != expected:
            self.refuse(
                DraftFault.POSITION, f"position {chunk.start_position} instead of {expected}"
            )
        if not chunk.token_ids and not chunk.last:
            self.refuse(DraftFault.CHUNKS, "an empty chunk that is not the last")

    def _check_tokens(self, chunk: DraftChunk) -> None:
        if len(chunk.token_ids) > self._left:
            self.refuse(DraftFault.TOKENS, f"{len(chunk.token_ids)} tokens, {self._left} remaining")
        size = self._open.drafter_vocab_size or LIMITS.vocab_size
        if max(chunk.token_ids, default=0) >= size:
            self.refuse(
                DraftFault.VOCABULARY,
                f"token ID {max(chunk.token_ids)}, but the vocabulary has {size}",
            )
        if not LIMITS.origins.issuperset(chunk.origins):
            names = ", ".join(sorted({Origin(o).name for o in chunk.origins}))
            self.refuse(DraftFault.ORIGINS, f"tokens of origin {names}")

    def _check_confidences(self, chunk: DraftChunk) -> None:
        """Check the confidences of drafted tokens and the scores of appended ones."""
        drafted = self.proposal
        for confidence in chunk.confidences:
            if not 0.0 <= confidence <= LIMITS.confidence:  # NaN too
                self.refuse(DraftFault.CONFIDENCES, f"confidence {confidence:g}")
        known = len(drafted.confidences) + len(chunk.confidences)
        if known not in (0, len(drafted.token_ids) + len(chunk.token_ids)):
            self.refuse(DraftFault.CONFIDENCES, f"{known} confidences, not one per token")
        scored = len(self._request.append_token_ids) if self._request.score else 0
        count = len(chunk.agreements)
        if count > (0 if drafted.token_ids else scored):
            self.refuse(DraftFault.AGREEMENTS, f"scores of {count} tokens instead of {scored}")

    def _check_tree(self, chunk: DraftChunk) -> None:
        """Check that all chunks make one tree, if that was requested, or else one chain."""
        request, parents = self._request, [*self.proposal.parents, *chunk.parents]
        count = len(self.proposal.token_ids) + len(chunk.token_ids)
        longest = count
        if parents:
            if not request.max_tree_tokens:
                self.refuse(DraftFault.TREE, "a tree that was not requested")
            try:
                check_parents("parents", parents, count)
            except InvalidArgumentError as error:
                self.refuse(DraftFault.TREE, str(error))
            longest = max(depths(parents))
        if longest > request.max_tokens:
            self.refuse(DraftFault.TOKENS, f"{longest} tokens in a row")

    def _check_timings(self, chunk: DraftChunk, elapsed_ns: int) -> None:
        """Check that times come with the last chunk only and fit in the time that has passed."""
        times = chunk.timings
        most = elapsed_ns + elapsed_ns // 100 + LIMITS.clock_ns if chunk.last else 0
        if times != _NO_TIMINGS and (
            times.service_ns > most or max(times.queue_ns, times.model_ns) > times.service_ns
        ):
            self.refuse(
                DraftFault.TIMINGS,
                f"times of {times.queue_ns} ns in its queue and {times.model_ns} ns in its model, "
                f"of {times.service_ns} ns in all, after {elapsed_ns} ns",
            )

    def _check_distributions(self, chunk: DraftChunk) -> None:
        wanted = len(chunk.token_ids) if self._open.distribution else 0
        if len(chunk.distributions) != wanted:
            self.refuse(
                DraftFault.DISTRIBUTIONS,
                f"{len(chunk.distributions)} distributions instead of {wanted}; run the same "
                "release of both services",
            )
        for token_id, distribution in zip(chunk.token_ids, chunk.distributions, strict=False):
            if objection := self._objection(distribution, token_id):
                self.refuse(DraftFault.DISTRIBUTIONS, objection)

    def _objection(self, distribution: TokenDistribution, token_id: int) -> str:
        """Return what is wrong with the distribution of `token_id`; empty if it is valid."""
        log_probs, ids = distribution
        spec, vocab_size = self._open.distribution, self._open.drafter_vocab_size
        assert spec is not None
        if not log_probs and not ids:
            return ""
        size = len(ids) or vocab_size or len(log_probs) // 2
        if bool(ids) != bool(spec.top_k) and not (ids and spec.draw_from_it):
            form = "a list of tokens" if ids else "the entire vocabulary"
            return f"a distribution over {form}, although top_k is {spec.top_k}"
        if len(ids) > (spec.top_k or size) or len(log_probs) != 2 * size:
            return (
                f"a distribution of {len(log_probs)} bytes of log-probabilities and {len(ids)} "
                "token IDs"
            )
        if ids and (max(ids) >= (vocab_size or LIMITS.vocab_size) or len(set(ids)) < len(ids)):
            return "a distribution with duplicate or unknown token IDs"
        if not are_log_probs(log_probs):
            return "a distribution with NaN or a log-probability above 0"
        if all_impossible(log_probs) or (ids and any_impossible(log_probs)):
            return "a distribution with probability 0 for a listed token, or for all tokens"
        if spec.draw_from_it:
            index = ids.index(token_id) if token_id in ids else -1 if ids else token_id
            if index < 0 or log_probs[2 * index : 2 * index + 2] == IMPOSSIBLE:
                return f"a distribution with probability 0 for token {token_id}, drawn from it"
        return ""

    def check_end(self, status: str, details: str, is_first: bool) -> None:
        """Check the status that ended the stream; `is_first` if nothing was answered before.

        `OK` means the drafter ended it on its own. Raises `DrafterFaultError`.
        """
        if status == "RESOURCE_EXHAUSTED" and "larger than max" in details:  # from our gRPC client
            self.refuse(DraftFault.SIZE, f"a message over the size limit ({details})")
        if status not in LAWFUL_ENDS and not (status == "FAILED_PRECONDITION" and is_first):
            self.refuse(DraftFault.STATUS, f"an end of stream with status {status} ({details})")

    def refuse(self, fault: DraftFault, came: str) -> NoReturn:
        """Raise `DrafterFaultError` with what was sent and what was expected."""
        request, spec = self._request, self._open.distribution
        also = "".join((
            f", or a tree of {request.max_tree_tokens}" if request.max_tree_tokens else "",
            f", with scores of {len(request.append_token_ids)} tokens" if request.score else "",
            f", with distributions (top_k {spec.top_k})" if spec else "",
        ))  # fmt: skip
        raise DrafterFaultError(
            fault,
            f"sent {came}; expected at most {request.max_tokens} tokens at position "
            f"{self.proposal.start_position} in round {request.round_id}{also}",
        )


def check_description(info: DraftServiceInfo) -> None:
    """Check a draft service's description. Raises `DrafterFaultError`."""
    limits, names = LIMITS, [drafter.name for drafter in info.drafters]
    for what, value, range_ in (
        ("drafters", len(names), limits.drafters),
        ("max_speculative_tokens", info.max_speculative_tokens, limits.max_speculative_tokens),
        *(("vocab_size", d.model.vocab_size, Range(1, limits.vocab_size))
          for d in info.drafters if d.model),
    ):  # fmt: skip
        if value not in range_:
            raise DrafterFaultError(
                DraftFault.DESCRIPTION, f"describes itself with {what} {value}, not in {range_}"
            )
    if len(set(names)) < len(names) or not all(re.fullmatch(limits.name, n) for n in names):
        raise DrafterFaultError(
            DraftFault.DESCRIPTION, f"describes drafters with invalid names {names!r:.200}"
        )
