"""Services in this process over a `World`; their streams are fake and break when told to.

The orchestrator's own sessions speak real messages to them. What they are told is checked: a length
beyond what they hold, or another prefix than the hash says, fails the test.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

import grpc

from flyspec import wire
from flyspec.prefix import TokenSequence
from flyspec.rules import Rule
from flyspec.values.admin import HeadInfo
from flyspec.values.rounds import (
    Budget,
    DistributionSpec,
    DraftAdvance,
    DraftChunk,
    DraftDistributions,
    DraftOpen,
    HeadProposal,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution
from orchestrator.fleet.target_replicas import TargetReplicas
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.output import Output
from orchestrator.generation.pace import FixedPace, Pace
from orchestrator.generation.plan import DraftPlan, GenerationPlan, Judging, OutputLimits
from orchestrator.generation.progress import Progress
from orchestrator.generation.rounds import Rounds
from orchestrator.generation.verifying import Verifying
from orchestrator.upstreams.connection import Attempt
from orchestrator.upstreams.draft import GrpcDraftSession
from orchestrator.upstreams.half_floats import IMPOSSIBLE
from orchestrator.upstreams.protocol import UNKNOWN
from orchestrator.upstreams.verify import GrpcVerifySession
from tests.orchestrator.pools import INFO, TARGET, pool_of, registry_of
from tests.orchestrator.world import EOS, World, judge

CERTAIN = b"\0\0"
HEAD = HeadInfo("head", "eagle3", 5)
NEVER_S = 3600.0
"""The fakes' timeouts: a machine that stalls for seconds must not look like a lost service, since
other drafts may give another output under a loose rule."""


@dataclass
class Offer:
    """How many tokens the drafter proposes now, at most.

    `delay`: turns of the event loop that it takes. It may tell `confidences` and scores.
    """

    k: int
    delay: int = 0
    confidences: bool = False
    scores: bool = False


class _Call:
    """A stream. `breaks` says at which of its next messages it breaks."""

    def __init__(self, service) -> None:
        self._service = service
        self._answers: deque = deque()
        self._lost = False
        self.tokens: list[int] | None = None

    async def write(self, message) -> None:
        await asyncio.sleep(0)
        if self._lost or self._service.breaks("write"):
            self._lost = True
            raise asyncio.InvalidStateError
        self._service.seen(message)
        self._answers += self.answer(message)

    async def read(self):
        for _ in range(1 + self._service.offer.delay):
            await asyncio.sleep(0)
        if self._lost or self._service.breaks("read"):
            self._lost = True
            return grpc.aio.EOF
        answer = self._answers.popleft()
        self._service.seen(answer)
        return answer

    async def code(self):
        return grpc.StatusCode.UNAVAILABLE

    async def details(self):
        return "the test broke the stream"

    def cancel(self) -> None:
        self._lost = True

    def move(self, keep_length: int, append) -> list[int]:
        """The sequence after "keep that many, then append these"."""
        assert self.tokens is not None, "opened first"
        assert keep_length <= len(self.tokens), "keeps more than is held"
        self.tokens = [*self.tokens[:keep_length], *append]
        return list(self.tokens)


class _Service:
    """What both have in common: streams that break on command. `seen` gets all messages."""

    address, timeout_s = "fake", NEVER_S
    offer = Offer(0)
    seen: Callable[[Any], None] = staticmethod(lambda message: None)

    def __init__(self) -> None:
        self._breaks: deque[str] = deque()
        self.sequences: dict[int, list[int]] = {}
        self.opened = 0

    async def close(self) -> None:
        pass

    def attempt(self, timeout_s: float) -> Attempt:
        return Attempt("fake service", self.address, timeout_s)

    def break_at(self, kind: str) -> None:
        """The next write or read loses the stream; one loss at a time is waiting."""
        if not self._breaks:
            self._breaks.append(kind)

    def breaks(self, kind: str) -> bool:
        if self._breaks and self._breaks[0] == kind:
            self._breaks.popleft()
            return True
        return False


class FakeDraft(_Service):
    """A draft service; `alter` changes its answers, if a test sets it."""

    alter: Callable[[list], None] = staticmethod(lambda answers: None)

    def __init__(self, world: World, offer: Offer) -> None:
        super().__init__()
        self.world, self.offer = world, offer
        self.stub = SimpleNamespace(Draft=lambda metadata=(): _DraftCall(self))

    def open(self, open_, metrics, correlation=UNKNOWN):
        return GrpcDraftSession(self, open_, metrics, correlation)


class _DraftCall(_Call):
    def answer(self, message):
        service, request = self._service, wire.unwrap(message)
        if isinstance(request, DraftOpen):
            service.opened += 1
            self.spec = request.distribution
            self.tokens = list(request.token_ids)
            return []
        assert isinstance(request, DraftAdvance)
        world, offer = service.world, service.offer
        tokens = self.move(request.keep_length, request.append_token_ids)
        service.sequences[request.round_id] = list(tokens)
        base, left = len(tokens), 1.0
        agreements = [
            world.guess(tokens[:i]) == tokens[i]
            for i in range(request.keep_length, base)
            if request.score and offer.scores
        ]
        while len(tokens) - base < min(request.max_tokens, offer.k):
            left *= world.confidence(tokens)
            tokens.append(world.guess(tokens))
            if tokens[-1] == EOS or (offer.confidences and left < request.min_confidence):
                break
        self.tokens = tokens
        # In pieces of three, so that a proposal has several messages.
        starts = list(range(base, len(tokens), 3)) or [base]
        chunks = [self._chunk(request, tokens, base, start, starts[-1]) for start in starts]
        chunks[0] = replace(chunks[0], agreements=agreements)
        answers = [wire.encode(chunk) for chunk in chunks]
        service.alter(answers)
        return answers

    def _chunk(self, request, tokens, base, start, last):
        end = min(start + 3, len(tokens))
        drafted, world = tokens[start:end], self._service.world
        tells = self._service.offer.confidences
        return DraftChunk(
            request.round_id,
            base - 1,
            tokens[base - 1],
            start,
            drafted,
            [Origin.EXACT_MODEL] * len(drafted),
            start == last,
            distributions=[self._distribution(t) for t in drafted] if self.spec else [],
            confidences=[world.confidence(tokens[:i]) for i in range(start, end) if tells],
        )

    def _distribution(self, token):
        """Probability 1 on its token, as a list or over the whole vocabulary."""
        if self.spec.top_k:
            return TokenDistribution(CERTAIN, (token,))
        row = [IMPOSSIBLE] * TARGET.vocab_size
        row[token] = CERTAIN
        return TokenDistribution(b"".join(row))


class FakeVerify(_Service):
    """A verify service. `rounds` holds what each was asked to check; less while it is `full`.

    Its head guesses as the drafter does, up to `head_k` tokens; at times it has no proposal.
    """

    full = False
    head_k = 1000

    def __init__(self, world: World, window_size: int) -> None:
        super().__init__()
        self.world, self.window_size = world, window_size
        self.rounds: dict[int, VerifyRound] = {}
        self.distributions: dict[int, list[TokenDistribution]] = {}
        self.distributes = False
        self.stub = SimpleNamespace(Verify=lambda metadata=(): _VerifyCall(self))

    def open(self, open_, metrics, correlation=UNKNOWN):
        return GrpcVerifySession(self, open_, metrics, correlation)


class _VerifyCall(_Call):
    def answer(self, message):
        service, request = self._service, wire.unwrap(message)
        if isinstance(request, VerifyOpen):
            service.opened += 1
            self.logprobs = request.logprobs
            self.tokens = list(request.token_ids)
            self.pieces = []
            return []
        if isinstance(request, DraftDistributions):
            self.pieces.append(request)
            return []
        tokens = self.move(request.keep_length, request.append_token_ids)
        assert request.prefix_hash == TokenSequence(tokens).hash
        assert request.open_window is None or request.draft_token_ids, "a window needs drafts"
        service.sequences[request.round_id] = list(tokens)
        service.rounds[request.round_id] = request
        service.distributions[request.round_id] = self._distributions(request, len(tokens))
        # The rest of plain decoding that this round ends may have been written, or not.
        while self._answers and service.world.choice([len(self._answers), *tokens], 2):
            self._answers.pop()
        if request.draft_token_ids:
            request = self._admitted(request, tokens)
            if request.open_window and not request.draft_token_ids:
                window = request.open_window
                failed = Verdict(window.position, window.target_token_id, start_length=len(tokens))
                return [self._answer(replace(failed, round_id=request.round_id))]
            return [self._answer(judge(service.world, tokens, request, service.window_size))]
        return self._plain(request)

    def _admitted(self, request, tokens):
        """With chances, some of the last drafts may be left out, or all of them."""
        if not request.draft_survivals or not self._service.full:
            return request
        drafts = request.draft_token_ids
        count = self._service.world.choice(tokens, len(drafts) + 1)
        request = replace(request, draft_token_ids=drafts[:count])
        self._service.rounds[request.round_id] = request
        return request

    def _distributions(self, request, first):
        sent = []
        for piece in self.pieces:
            assert (piece.round_id, piece.first_position) == (request.round_id, first + len(sent))
            sent += piece.distributions
        self.pieces = []
        return sent

    def _plain(self, request):
        """Bursts of up to three tokens, or of one if log-probabilities are requested."""
        answers, world, left = [], self._service.world, request.max_plain_tokens
        while (left and self.tokens[-1] != EOS) or not answers:
            start, longest = len(self.tokens), 1 if self.logprobs is not None else min(left, 3)
            size, drawn = 1 + world.choice(self.tokens, longest), []
            while len(drawn) < size and EOS not in drawn:
                drawn.append(world.own([*self.tokens, *drawn]))
            left -= len(drawn)
            verdict = Verdict(
                start + len(drawn) - 1,
                drawn[-1],
                start_length=start,
                round_id=request.round_id,
                last=not left or drawn[-1] == EOS,
                plain_token_ids=tuple(drawn[:-1]),
            )
            answers.append(self._answer(verdict, request))
        return answers

    def _answer(self, verdict, request=None):
        world = self._service.world
        request = request or self._service.rounds[verdict.round_id]
        before = len(self.tokens)
        new = verdict.plain_token_ids or request.draft_token_ids
        kept = [*self.tokens, *new][: verdict.keep_length]
        self.tokens = [*kept, verdict.next_token_id]
        if self.logprobs is not None:
            first = min(before, verdict.keep_length)
            logprobs = tuple(
                world.logprobs(self.tokens[:i], self.tokens[i])
                for i in range(first, len(self.tokens))
            )
            verdict = replace(verdict, logprobs=logprobs)
        return wire.encode(replace(verdict, proposal=self._proposal(verdict, request.head)))

    def _proposal(self, verdict, asked):
        world, tokens = self._service.world, list(self.tokens)
        if asked is None or not verdict.last or verdict.failed or tokens[-1] == EOS:
            return None
        if not world.choice(tokens, 5):
            return None
        chances = []
        while len(chances) < min(asked.max_tokens, self._service.head_k):
            chances.append(world.confidence(tokens))
            tokens.append(world.guess(tokens))
            if tokens[-1] == EOS or math.prod(chances) < asked.min_confidence:
                break
        drafted = tokens[len(self.tokens) :]
        points = [TokenDistribution()] * (len(drafted) if self._service.distributes else 0)
        return HeadProposal(drafted, chances, points)


PLAN = GenerationPlan(
    prompt_token_ids=[3, 4, 5],
    sampling=SamplingParams(),
    seed=1,
    limits=OutputLimits(max_tokens=40, context_length=256, max_plain_tokens=4),
    judging=Judging(Rule("margin")),
    drafts=DraftPlan(num_speculative_tokens=4),
)


def plan_of(max_loose_tokens=None, max_loose_cost_nats=None, **changes) -> GenerationPlan:
    """A plan over the fakes; `changes` by the names of fields, in whichever part they are."""
    parts, changes["allowed"] = {}, Budget(max_loose_tokens, max_loose_cost_nats)
    for name in ("limits", "judging", "drafts", "reporting"):
        part = getattr(PLAN, name)
        mine = {f.name: changes.pop(f.name) for f in fields(part) if f.name in changes}
        parts[name] = replace(part, **mine)
    return replace(PLAN, **parts, **changes)


@dataclass
class Fakes:
    """A generation over fake services, with the default drafter, or `head` or `relay`."""

    world: World
    plan: GenerationPlan
    tokenizer: object
    window_size: int = 3
    offer: Offer = field(default_factory=lambda: Offer(1000))
    pace: Pace | None = None
    drafter: str = ""

    def __post_init__(self) -> None:
        drafts = replace(self.plan.drafts, drafter=self.drafter)
        plan = self.plan = replace(self.plan, drafts=drafts)
        self.verify = FakeVerify(self.world, self.window_size)
        self.draft = FakeDraft(self.world, self.offer)
        self.ledger, limits = Ledger(plan.judging.allowed), plan.limits
        self.output = Output(self.tokenizer, limits)
        self.drafters = registry_of(self.draft)
        self.verify.distributes = plan.drafts.distribution is not None
        targets = pool_of(self.verify)
        if self.drafter:
            targets = pool_of(self.verify, info=SimpleNamespace(**vars(INFO), heads=(HEAD,)))
            self.drafters.adopt_heads(targets, (HEAD,))
        self.drafting = Drafting(self.drafters, plan, TARGET, self.ledger)
        self.verifying = Verifying(TargetReplicas(targets, TARGET), plan, NEVER_S, self.ledger)
        self.pace = self.pace or FixedPace(plan.drafts.num_speculative_tokens)
        self.progress = Progress(plan, self.pace, self.drafting, self.verifying, self.ledger)
        self.rounds = Rounds(self.progress)

    async def run(self, limit: int = 10_000):
        """Yield every round with its effect for the client, to the end of the output."""
        running = self.rounds.run()
        try:
            for _ in range(limit):
                round_ = await anext(running)
                update = self.output.apply(round_.commands)
                ended = self.output.finish_reason is not None
                length = len(self.plan.prompt_token_ids) + self.output.num_final_tokens
                self.ledger.record(round_, update.final, length if ended else math.inf)
                if ended:
                    self.ledger.finish()
                yield round_, update
                if ended:
                    return
        finally:
            await running.aclose()
        raise AssertionError("the generation does not end")


FULL = DistributionSpec()
