"""Services that answer by a script, behind the protocols that those over gRPC satisfy: no port.

The target's next token is a function of the tokens before it; a draft stands if it is that token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc

from flyspec.config import OrchestratorSettings
from flyspec.errors import UnavailableError
from flyspec.rule_files import load_rules
from flyspec.self_drafting import following_round
from flyspec.telemetry import Telemetry
from flyspec.values.admin import (
    DrafterInfo,
    DraftServiceInfo,
    HeadInfo,
    ModelInfo,
    SessionStatus,
    TokenizerBundle,
    VerifyServiceInfo,
)
from flyspec.values.generation import Chunk, Completion, RoundRecord, Started
from flyspec.values.requests import GenerateOptions, GenerationRequest
from flyspec.values.rounds import (
    Decision,
    DraftAdvance,
    DraftChunk,
    HeadProposal,
    HeadRequest,
    Outcome,
    Verdict,
    VerifyRound,
)
from flyspec.values.tokens import Origin
from orchestrator.admission.admission import Admission
from orchestrator.admission.clients import Caller
from orchestrator.fleet.fleet import Fleet
from orchestrator.generations import Generations
from orchestrator.telemetry.requests import RequestObserver
from orchestrator.upstreams.protocol import UNKNOWN, Correlation, SilentError
from tests.orchestrator.tokenizer import BUNDLE

EOS, VOCAB_SIZE, CONTEXT = 1, 400, 256
MODEL = ModelInfo("scripted", BUNDLE.fingerprint, VOCAB_SIZE, CONTEXT)
Script = Callable[[Sequence[int]], int]
PROMPT = [5, 6, 7]


def script(tokens: Sequence[int]) -> int:
    """Letters and spaces that depend on everything before; never the end."""
    return 3 + (7 * sum(tokens) + len(tokens) ** 2) % 200


def guess(tokens: Sequence[int]) -> int:
    """Mostly right."""
    return 5 if sum(tokens) % 4 == 0 else script(tokens)


class Service:
    """A replica. `sessions` are open now; while `lost`, none is served."""

    timeout_s = 3600.0  # a machine that stalls for seconds is no lost service

    def __init__(self, address: str, next_token: Script, pause_s: float = 0.0) -> None:
        self.address, self.next_token, self.pause_s = address, next_token, pause_s
        self.sessions: set[Any] = set()
        self.opened = 0
        self.lost = False

    async def answer(self) -> None:
        """Wait as long as an answer takes. Raises `UnavailableError`."""
        await asyncio.sleep(self.pause_s)
        if self.lost:
            raise UnavailableError(f"{self.address} is lost")

    async def reconnect(self) -> None:
        """There is nothing to connect."""

    async def close(self) -> None:
        """There is nothing to close."""


class Session:
    """A session, open from its first message on."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def begin(self) -> None:
        """The first message, or another."""
        if self not in self.service.sessions:
            self.service.sessions.add(self)
            self.service.opened += 1

    def close(self) -> None:
        """It is over."""
        self.service.sessions.discard(self)


class Target(Service):
    """A verify service; `limit` sessions. Its `heads` propose by these functions of the tokens.

    `requests` are those for heads, in order; a head that is `faulty` breaks what it proposes. It
    `goes_on` with rounds by itself; `sent` are those that were sent.
    """

    limit, goes_on = 4, True
    head_max_tokens = 5
    faulty: Callable[[HeadProposal], HeadProposal | None] = staticmethod(lambda proposal: proposal)

    def __init__(self, address: str, next_token: Script, pause_s: float = 0.0) -> None:
        super().__init__(address, next_token, pause_s)
        self.heads: dict[str, Script] = {}
        self.requests: list[HeadRequest | None] = []
        self.sent: list[VerifyRound] = []

    async def describe(self, timeout_s: float = 1.0) -> VerifyServiceInfo:
        await self.answer()
        heads = tuple(HeadInfo(n, "eagle3", self.head_max_tokens, 9, "f" * 32) for n in self.heads)
        return VerifyServiceInfo(
            MODEL, SessionStatus(0, self.limit), 64, 8, ("exact", "fly"), heads=heads
        )

    def proposal(self, tokens: Sequence[int], request: HeadRequest | None) -> HeadProposal | None:
        """What a head proposes after these tokens."""
        self.requests.append(request)
        if request is None or not request.max_tokens:
            return None
        assert request.max_tokens <= self.head_max_tokens
        drafts: list[int] = []
        while len(drafts) < request.max_tokens:
            drafts.append(self.heads[request.name]([*tokens, *drafts]))
        return self.faulty(HeadProposal(drafts, [0.9] * len(drafts)))

    async def tokenizer(self) -> TokenizerBundle:
        return BUNDLE

    def open(self, open_, metrics, correlation: Correlation = UNKNOWN) -> TargetSession:
        return TargetSession(self)


class TargetSession(Session):
    drafts: HeadProposal | None = None

    def keep(self, length: int) -> None:
        """Its sequence comes whole with every round."""

    async def send(self, sequence, round_, distributions) -> None:
        self.begin()
        self.tokens, self.round, self.drafts = list(sequence.tokens), round_, None
        self.service.sent.append(round_)

    async def read(self, round_id: int) -> Verdict:
        await self.service.answer()
        assert round_id == self.round.round_id
        start, decisions, top = len(self.tokens), [], ()
        if self.round.num_top_tokens:  # after the sequence, and after each draft
            drafts = self.round.draft_token_ids
            rows = [[*self.tokens, *drafts[:count]] for count in range(len(drafts) + 1)]
            top = tuple(own + i for own in map(script, rows) for i in range(2))
        for draft in self.round.draft_token_ids:
            own = self.service.next_token(self.tokens)
            rejected = draft != own
            decisions.append(Decision(Outcome.REJECTED if rejected else Outcome.EXACT, own))
            if rejected:
                break
            self.tokens.append(own)
        missing = len(self.round.draft_token_ids) - len(decisions)
        decisions += [Decision(Outcome.NOT_REACHED)] * missing
        keep_length, drafts, head = len(self.tokens), self.drafts, self.round.head
        self.tokens.append(self.service.next_token(self.tokens))
        verdict = Verdict(
            keep_length, self.tokens[-1], tuple(decisions), start_length=start, round_id=round_id,
            proposal=self.service.proposal(self.tokens, head), drafts=drafts, top_token_ids=top,
        )  # fmt: skip
        if not (head and head.num_rounds and self.service.goes_on):
            return verdict
        self.drafts = verdict.proposal or HeadProposal()
        following = following_round(self.round, verdict)
        self.round = replace(following, draft_token_ids=self.drafts.token_ids)
        return replace(verdict, proposal=None, started_staged_round_id=round_id + 1)


class Drafter(Service):
    """A draft service; what `offered` lists. `asked` has sequences and requests, in order."""

    offered: tuple[DrafterInfo, ...] = (DrafterInfo("guess", "model", MODEL),)

    def __init__(self, address: str, next_token: Script, pause_s: float = 0.0) -> None:
        super().__init__(address, next_token, pause_s)
        self.scopes: list[str] = []
        self.asked: list[tuple[list[int], DraftAdvance]] = []

    async def describe(self, timeout_s: float = 1.0) -> DraftServiceInfo:
        await self.answer()
        return DraftServiceInfo(self.offered, SessionStatus(0, 16), 64)

    async def add_tokenizer(self, bundle: TokenizerBundle, vocab_size: int) -> None:
        raise AssertionError("it has the target's own")

    def open(self, open_, metrics, correlation: Correlation = UNKNOWN) -> DrafterSession:
        self.scopes.append(open_.sharing_scope)
        return DrafterSession(self)


class DrafterSession(Session):
    held = 0

    def keep(self, length: int) -> None:
        self.held = min(self.held, length)

    async def propose(self, token_ids, request, timeout_s) -> DraftChunk:
        self.begin()
        try:
            async with asyncio.timeout(timeout_s):
                await self.service.answer()
        except TimeoutError:
            raise SilentError(f"{self.service.address} is silent") from None
        tokens = list(token_ids)
        self.service.asked.append((list(tokens), request))
        self.held = len(tokens)
        for _ in range(request.max_tokens):
            tokens.append(self.service.next_token(tokens))
        drafts = tokens[len(token_ids) :]
        return DraftChunk(token_ids=drafts, origins=[Origin.EXACT_MODEL] * len(drafts))

    async def propose_ahead(self, length, request) -> None:
        """It does one thing at a time and is queried again."""


@dataclass
class Scripted:
    """An orchestrator without its front ends. Addresses are names of these services."""

    targets: dict[str, Target]
    drafters: dict[str, Drafter]
    secure = True

    def to_verify(self, address: str, server_name: str) -> Target:
        return self.targets[address]

    def to_draft(self, address: str, server_name: str) -> Drafter:
        return self.drafters[address]

    @property
    def sessions(self) -> int:
        """Sessions open anywhere."""
        return sum(len(s.sessions) for s in (*self.targets.values(), *self.drafters.values()))

    @property
    def left(self) -> tuple[int, ...]:
        """What a finished generation must not leave behind: all zero."""
        users = sum(len(d.users) for d in self.fleet.drafters.all)
        replicas = sum(len(r.sessions) for r in self.fleet.targets.replicas)
        admission = self.admission
        held = admission.active, admission.waiting, admission.outstanding_tokens
        return (self.sessions, users, replicas, *held)


@asynccontextmanager
async def scripted(targets=1, pause_s=0.0, next_token=script, heads=None, **changes):
    """Runs generations over services in this process; all targets have these `heads`."""
    names = [f"target:{n}" for n in range(1, targets + 1)]
    inside = Scripted(
        {name: Target(name, next_token, pause_s) for name in names},
        {"drafter:1": Drafter("drafter:1", guess)},
    )
    for target in inside.targets.values():
        target.heads = dict(heads or {})
    values = {"rule": "exact", "num_speculative_tokens": 4, "max_waiting": 100, **changes}
    settings = OrchestratorSettings(
        verify_address=",".join(names), draft_address="drafter:1", **values
    )
    inside.fleet = fleet = Fleet(settings, inside)
    await fleet.connect()
    for drafter in inside.drafters.values():
        drafter.opened, drafter.scopes, drafter.asked = 0, [], []  # but by its trial
    inside.admission = Admission(settings, lambda: fleet.max_sessions)
    rules = load_rules("", settings.rule, settings.num_speculative_tokens)
    inside.observer = RequestObserver(Telemetry("orchestrator"))
    inside.generations = Generations(fleet, inside.admission, settings, rules, inside.observer)
    try:
        yield inside
    finally:
        await fleet.close()


def request(prompt=PROMPT, **options: Any) -> GenerationRequest:
    return GenerationRequest(prompt, GenerateOptions(**options))


def expected(count: int, prompt: Sequence[int] = PROMPT, next_token: Script = script) -> list[int]:
    """The target's own text."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class Run:
    """A finished generation."""

    def __init__(self, events: Sequence[Any]) -> None:
        def of(kind: type) -> list[Any]:
            return [event for event in events if isinstance(event, kind)]

        self.events, self.chunks, self.rounds = events, of(Chunk), of(RoundRecord)
        (self.started,), (self.completion,) = of(Started), of(Completion)
        self.tokens = [token for chunk in self.chunks for token in chunk.token_ids]
        self.origins = [origin for chunk in self.chunks for origin in chunk.origins]
        self.text = "".join(chunk.text for chunk in self.chunks)
        self.drafters = [share.drafter for share in self.completion.drafters]


async def run(inside: Scripted, asked: GenerationRequest, at=None, **caller: Any) -> Run:
    """Run a generation; `at` maps numbers of tokens to what is then awaited."""
    events, count, at = [], 0, dict(at or {})
    async for event in inside.generations.run(asked, Caller(**caller)):
        events.append(event)
        count += len(event.token_ids) if isinstance(event, Chunk) else 0
        for due in [due for due in at if due <= count]:
            await at.pop(due)()
    return Run(events)


async def takes() -> None:
    """Has room for everything."""


class Taker:
    """A call's context: its first message is read at once; `take` handles the others."""

    def __init__(self, take=takes, left_s: float | None = None) -> None:
        self.take, self.left_s = take, left_s
        self.taken = 0
        self.code: grpc.StatusCode | None = None
        self.details = ""

    def invocation_metadata(self) -> tuple[()]:
        return ()

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def time_remaining(self) -> float | None:
        return self.left_s

    async def write(self, message) -> None:
        self.taken += 1
        if self.taken > 1:
            await self.take()

    async def abort(self, code, details, trailing_metadata=()) -> None:
        self.code, self.details = code, details
        raise grpc.aio.AbortError
