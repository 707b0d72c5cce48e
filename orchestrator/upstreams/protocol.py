"""The interface between the orchestrator and the draft and verify services, in plain values.

`draft` and `verify` implement these protocols over gRPC. All methods raise `FlyspecError`, and
`UnavailableError` where a retry may succeed.
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
    MAX_TIME_LIMIT_MS,
    DraftAdvance,
    DraftChunk,
    DraftOpen,
    SessionStatus,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import TokenDistribution


class SilentError(UnavailableError):
    """A service accepted a message but did not answer in time: it hangs or is overloaded."""


DRAFTING_SHARE = 0.5
"""Share of a proposal's timeout after which the drafter is to send what it has; only one that has
nothing by the end of the timeout hangs."""


def time_limit_ms(timeout_s: float) -> int:
    """Return the time limit of a proposal with that timeout."""
    return int(min(max(1.0, 1000 * DRAFTING_SHARE * timeout_s), MAX_TIME_LIMIT_MS))


class UnreadableError(UnavailableError):
    """A service sent bytes that are not a valid message."""


Info = TypeVar("Info", covariant=True)
Open = TypeVar("Open", contravariant=True)
Session = TypeVar("Session", covariant=True)
Part = Literal["draft", "verify"]


class Correlation:
    """Correlates the logs and spans of all services that work on a request.

    `metadata` is sent with the request's streams. This base class does not trace.
    """

    def __init__(self, request_id: str = "") -> None:
        self.metadata: tuple[tuple[str, str], ...] = ()
        if request_id:
            self.metadata = ((REQUEST_ID_KEY, request_id),)

    @property
    def traceparent(self) -> str:
        """The request's own span, for messages of which it is not known whether they count."""
        return ""

    def waits_for(self, part: Part, round_id: int) -> str:
        """Return the traceparent for a message that requests `part` of a round.

        Retries get the same one. Empty if the request is not traced.
        """
        return ""


UNKNOWN = Correlation()


class UpstreamSession(Protocol):
    """A generation's session with one replica, ended by its first error."""

    def close(self) -> None:
        """End the session and free its slot; pending calls raise `UnavailableError`."""


class DraftSession(UpstreamSession, Protocol):
    """Proposals for one sequence."""

    @property
    def held(self) -> int:
        """Tokens of the sequence already processed by the service."""

    def keep(self, length: int) -> None:
        """Record that the sequence was truncated to `length` tokens, and may have grown again."""

    async def propose(
        self, token_ids: Sequence[int], request: DraftAdvance, timeout_s: float
    ) -> DraftChunk:
        """Propose a continuation of `token_ids`, which must not change meanwhile.

        `keep_length` and `append_token_ids` of `request` are filled in. Its `score` is ignored
        where the appended tokens cannot be scored.
        """

    async def propose_ahead(self, length: int, request: DraftAdvance) -> None:
        """Request a draft of what follows `length` tokens, the last of which were just proposed.

        If these tokens are accepted and the next token equals the first one drafted ahead, the rest
        is the proposal of round `request.round_id`, unless that needs more tokens than requested
        here. Otherwise the next `propose` discards it. Returns once the request has been sent.
        """

    async def next_ahead(self) -> DraftChunk:
        """Return the next proposal that was made ahead, as requested with the last proposal.

        It builds on its `keep_length` and `next_token_id`. Waits until there is one; may be
        cancelled, and must not run during `propose`. If the sequence comes to be what it builds on,
        the next `propose` returns it.
        """

    async def confirm(
        self, token_ids: Sequence[int], proposal: DraftChunk, request: DraftAdvance
    ) -> None:
        """Tell the service that the sequence is `token_ids` and `proposal` is being verified.

        That is a proposal made ahead. It goes on as `request.ahead` says.
        """


class VerifySession(UpstreamSession, Protocol):
    """Verdicts on one sequence."""

    async def wait_for_slot(self, token_ids: Sequence[int], waited_s: float) -> SessionStatus:
        """Open the session before its first round, and wait until the service grants it a slot.

        The sequence is `token_ids`; its request has already waited `waited_s` seconds.
        """

    def keep(self, length: int) -> None:
        """Record that the sequence was truncated to `length` tokens, and may have grown again."""

    async def send(
        self,
        sequence: TokenSequence,
        round_: VerifyRound,
        distributions: Sequence[TokenDistribution],
    ) -> None:
        """Send a round that continues `sequence`.

        `keep_length`, `append_token_ids` and `prefix_hash` of `round_` are filled in.
        `distributions` holds one per draft token, or is empty.
        """

    async def stage(self, round_: VerifyRound) -> None:
        """Send a staged round, complete with its prefix; another task may `read` meanwhile.

        Cancelling this does not interrupt the message.
        """

    async def read(self, round_id: int) -> Verdict:
        """Return the next verdict on a round; plain decoding has several, up to the `last`.

        A round may be sent before the last verdict of the previous one, if that decodes plainly.
        """


class Upstream(Protocol[Info, Open, Session]):
    """A connection to one replica of a service; `timeout_s` applies to each answer."""

    address: str
    timeout_s: float

    async def describe(self, timeout_s: float = ...) -> Info:
        """Return the service's description of itself."""

    def open(
        self, open_: Open, metrics: SpeculationMetrics, correlation: Correlation = UNKNOWN
    ) -> Session:
        """Return a session, which is opened by its first round; `open_.token_ids` is filled in.

        Bytes sent and received in its rounds are counted in `metrics`.
        """

    async def reconnect(self) -> None:
        """Drop a connection that may be dead, ending all sessions; the next call reconnects."""

    async def close(self) -> None:
        """Close the connection."""


class DraftUpstream(Upstream[DraftServiceInfo, DraftOpen, DraftSession], Protocol):
    """A connection to a draft service."""

    async def add_tokenizer(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        """Send the target's tokenizer to the service."""


class VerifyUpstream(Upstream[VerifyServiceInfo, VerifyOpen, VerifySession], Protocol):
    """A connection to a verify service."""

    async def tokenizer(self) -> TokenizerBundle:
        """Return the target's tokenizer."""


class Connector(Protocol):
    """Creates connections to services.

    `server_name` is the DNS name that resolved to the address, which the certificate must match;
    empty if the address was configured directly.
    """

    secure: bool
    """True if connections are encrypted."""

    def to_draft(self, address: str, server_name: str) -> DraftUpstream:
        """Return a connection to a draft service, opened on first use."""

    def to_verify(self, address: str, server_name: str) -> VerifyUpstream:
        """Return a connection to a verify service, opened on first use."""
