"""What the orchestrator needs of the services behind it, in plain values.

`draft` and `verify` give it over gRPC; whatever else satisfies these protocols can stand there. All
methods raise `FlyspecError`, and `UnavailableError` for what another try may mend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

from flyspec.errors import UnavailableError
from flyspec.metadata import REQUEST_ID_KEY
from flyspec.prefix import TokenSequence
from flyspec.values.admin import DraftServiceInfo, TokenizerBundle, VerifyServiceInfo
from flyspec.values.generation import SpeculationMetrics
from flyspec.values.rounds import (
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.sessions import SessionStatus
from flyspec.values.tokens import TokenDistribution


class SilentError(UnavailableError):
    """A service took the message and said nothing in time: it hangs, or is overwhelmed."""


class UnreadableError(UnavailableError):
    """A service sent bytes that are no message."""


Info = TypeVar("Info", covariant=True)
Open = TypeVar("Open", contravariant=True)
Session = TypeVar("Session", covariant=True)
Part = Literal["draft", "verify"]


class Correlation:
    """What a request's streams and messages carry, so that logs and spans of all services agree.

    `metadata` is that of its streams. This one is not traced.
    """

    def __init__(self, request_id: str = "") -> None:
        self.metadata: tuple[tuple[str, str], ...] = ()
        if request_id:
            self.metadata = ((REQUEST_ID_KEY, request_id),)

    def waits_for(self, part: Part, round_id: int) -> str:
        """A message is about to ask for that part of a round; the traceparent that it carries.

        Asked again, for another try, the same one. Empty if the request is not traced.
        """
        return ""


UNKNOWN = Correlation()


class UpstreamSession(Protocol):
    """A generation's session with one replica. Its first error ends it."""

    def close(self) -> None:
        """End it; whoever waits on it gets `UnavailableError`, and the service frees the slot."""


class DraftSession(UpstreamSession, Protocol):
    """Proposals for one sequence."""

    @property
    def held(self) -> int:
        """Tokens of the sequence that the service has read; the others it must read first."""

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""

    async def propose(
        self, token_ids: Sequence[int], request: DraftAdvance, timeout_s: float
    ) -> DraftChunk:
        """What follows `token_ids`, within `timeout_s`; they do not change meanwhile.

        `request` comes without prefix: keep_length and append_token_ids are filled in. What is not
        told of a token's score is left out where it cannot be asked for.
        """

    async def propose_ahead(self, length: int, request: DraftAdvance) -> None:
        """Have drafted what follows `length` tokens, which the last proposal has a part in.

        If they stand and the token behind them is the first one of the answer, the rest of it is
        the next proposal, of `request.round_id`; unless that shall have more tokens than were asked
        for. Otherwise the next `propose` ends it. Done when the question has been sent.
        """


class VerifySession(UpstreamSession, Protocol):
    """Verdicts on one sequence."""

    async def wait_for_slot(self, token_ids: Sequence[int], waited_s: float) -> SessionStatus:
        """Open it, before its first round, once the service has a slot for it.

        Its request, whose sequence is `token_ids`, has waited `waited_s` already.
        """

    def keep(self, length: int) -> None:
        """Tell that the sequence was cut back to `length` tokens, whatever follows them now."""

    async def send(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution],
    ) -> None:
        """Ask for a round that follows `sequence`.

        `round_` comes without prefix: keep_length, append_token_ids and prefix_hash are filled in.
        `distributions` are those of its drafts, one each or none.
        """

    async def read(self, round_id: int) -> Verdict:
        """The next verdict on that round; several in plain decoding, up to the `last`.

        A round may be sent before the one before it, decoding plainly, has come to its last.
        """


class Upstream(Protocol[Info, Open, Session]):
    """A connection to one replica of a service; `timeout_s` is for one answer."""

    address: str
    timeout_s: float

    async def describe(self, timeout_s: float = ...) -> Info:
        """What the service says of itself."""

    def open(
        self, open_: Open, metrics: SpeculationMetrics, correlation: Correlation = UNKNOWN
    ) -> Session:
        """A session, which begins with its first round; `open_.token_ids` is filled in.

        The bytes of its rounds' messages are counted in `metrics`.
        """

    async def reconnect(self) -> None:
        """Give the connection up, which may be lost without a sign; the next call makes another.

        Ends all sessions.
        """

    async def close(self) -> None:
        """Close the connection."""


class DraftUpstream(Upstream[DraftServiceInfo, DraftOpen, DraftSession], Protocol):
    """To a draft service."""

    async def add_tokenizer(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        """Make the target's tokenizer known to it."""


class VerifyUpstream(Upstream[VerifyServiceInfo, VerifyOpen, VerifySession], Protocol):
    """To a verify service."""

    async def tokenizer(self) -> TokenizerBundle:
        """The target's tokenizer."""


class Connector(Protocol):
    """Makes connections to addresses.

    `server_name` is the name that the address was found by, which the certificate there has; empty
    for an address that was given.
    """

    secure: bool
    """Whether what it sends is encrypted."""

    def to_draft(self, address: str, server_name: str) -> DraftUpstream:
        """A connection, opened on first use."""

    def to_verify(self, address: str, server_name: str) -> VerifyUpstream:
        """A connection, opened on first use."""
