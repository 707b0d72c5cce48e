"""The draft service and a generation's stream to it: proposals, with distributions if wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flyspec import rpc, wire
from flyspec.errors import FlyspecError, UnavailableError
from flyspec.prefix import TokenSequence
from flyspec.v1 import draft_pb2, draft_pb2_grpc
from flyspec.values.admin import DraftServiceInfo, TokenizerBundle
from flyspec.values.rounds import DraftAdvance, DraftOpen, DraftTimings
from flyspec.values.tokens import Origin, TokenDistribution
from orchestrator.telemetry.correlation import UNKNOWN, Correlation
from orchestrator.upstreams.attempt import DESCRIBE_TIMEOUT_S, Attempt, read, write
from orchestrator.upstreams.connection import Upstream
from orchestrator.upstreams.traffic import Traffic


@dataclass(slots=True)
class Proposal:
    """Tokens that a drafter guesses will follow; possibly none.

    `distributions` has one a token where the rule needs them; `drafter` is the name of who made it.
    It was there at `arrived_ns`, as `perf_counter_ns` counts; 0 if nobody was asked.
    """

    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    timings: DraftTimings = field(default_factory=DraftTimings)
    distributions: list[TokenDistribution] = field(default_factory=list)
    drafter: str = ""
    arrived_ns: int = 0


class DraftUpstream(Upstream):
    """The draft service at an address; `timeout_s` is for one proposal."""

    def __init__(self, address: str, timeout_s: float, link: rpc.Link | None = None) -> None:
        super().__init__(address, timeout_s, draft_pb2_grpc.DraftServiceStub, link)

    async def describe(self, timeout_s: float = DESCRIBE_TIMEOUT_S) -> DraftServiceInfo:
        """What it drafts with. Raises `UnavailableError` when it does not answer."""
        async with Attempt("draft service", self.address, timeout_s):
            return wire.draft_info_from_proto(
                await self.stub.Describe(draft_pb2.DraftServiceDescribeRequest())
            )

    async def add_tokenizer(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        """Make the target's tokenizer known to it. Raises `FlyspecError`."""
        async with Attempt("draft service", self.address, self.timeout_s):
            await self.stub.AddTokenizer(iter(wire.add_tokenizer_to_protos(bundle, vocab_size)))


class DraftSession:
    """One generation's stream to a draft service; `open_.token_ids` is filled in.

    The first error ends it: what then is `Drafting`'s business.
    """

    def __init__(
        self,
        upstream: DraftUpstream,
        open_: DraftOpen,
        traffic: Traffic,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        self._upstream = upstream
        self._open = open_
        self._traffic, self._correlation = traffic, correlation
        self._call: Any = None
        self._synced = 0  # tokens on which the service's sequence and ours agree
        self._held = 0  # tokens that the service holds and that may stand, its proposal included

    def accept(self, length: int) -> None:
        """Tell that the first `length` tokens of sequence and last proposal stand."""
        self._synced = self._held = min(length, self._held)

    async def propose(
        self, sequence: TokenSequence, max_tokens: int, round_id: int, timeout_s: float
    ) -> Proposal:
        """Up to `max_tokens` tokens to follow `sequence`, within `timeout_s`.

        Raises `FlyspecError`.
        """
        try:
            async with Attempt("draft service", self._upstream.address, timeout_s):
                return await self._propose(sequence, max_tokens, round_id)
        except FlyspecError:
            self.close()
            raise

    @property
    def held(self) -> int:
        """Tokens of the sequence that the service has read; the others it must read first."""
        return self._synced if self._call is not None else 0

    async def _propose(self, sequence: TokenSequence, max_tokens: int, round_id: int) -> Proposal:
        tokens = sequence.tokens
        if self._call is None:
            self._call = self._upstream.stub.Draft(metadata=self._correlation.metadata)
            open_ = replace(self._open, token_ids=tokens)
            await write(self._call, wire.draft_open_to_proto(open_))
            self._synced = len(tokens)
        traceparent = self._correlation.waits_for("draft", round_id)
        advance = wire.draft_advance_to_proto(
            DraftAdvance(round_id, self._synced, tokens[self._synced :], max_tokens, traceparent)
        )
        self._traffic.count(advance)
        await write(self._call, advance)
        proposal = Proposal()
        while True:
            message = await read(self._call)
            chunk = wire.draft_chunk_from_proto(message)
            expected = len(tokens) + len(proposal.token_ids)
            if chunk.round_id != round_id or chunk.start_position != expected:
                raise UnavailableError(
                    f"answered round {chunk.round_id} at position {chunk.start_position} "
                    f"instead of round {round_id} at {expected}"
                )
            self._count(message, chunk.distributions)
            proposal.token_ids += chunk.token_ids
            proposal.origins += chunk.origins
            proposal.distributions += chunk.distributions
            if chunk.last:
                break
        if self._open.distribution and len(proposal.distributions) != len(proposal.token_ids):
            raise UnavailableError(
                f"sent {len(proposal.distributions)} distributions of "
                f"{len(proposal.token_ids)} drafts: run the same release of both"
            )
        self._held = len(tokens) + len(proposal.token_ids)
        proposal.timings = chunk.timings
        return proposal

    def _count(self, message: Any, distributions: Sequence[TokenDistribution]) -> None:
        """Count a chunk's bytes; takes the distributions out of the message, which is read."""
        if distributions:
            whole = message.ByteSize()
            message.ClearField("distributions")
            self._traffic.count_distributions(whole - message.ByteSize())
        self._traffic.count(message)

    def cut(self) -> None:
        """End the stream from outside; whoever waits on it gets `UnavailableError`."""
        if self._call is not None:
            self._call.cancel()

    def close(self) -> None:
        """End the stream; the service frees the session."""
        self.cut()
        self._call = None
