"""Where steps leave drafts out, rules that draw still follow the law that they state.

Whether a drafted position is checked may depend on the drafts before it, never on the draft itself:
to leave a token out for being unlikely, and then to draw from the target, is a selection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc
import pytest
import torch
from torch import Tensor

from draft_service.drafters.model import ModelDrafter
from flyspec import rpc, wire
from flyspec.config import VerifySettings
from flyspec.engine import stepwise
from flyspec.engine.distributions import decode
from flyspec.engine.model import Draw, Rows, Step
from flyspec.rules import Rule
from flyspec.step_costs import StepCosts
from flyspec.v1 import verify_pb2_grpc
from flyspec.values.admin import MeasuredStep, TokenizerBundle
from flyspec.values.rounds import (
    DistributionSpec,
    DraftDistributions,
    DraftOpen,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import Drafted, SamplingParams
from orchestrator.pace.acceptance import Acceptance, SharedAcceptance
from tests.scripted import ScriptedModel
from verify_service.adaptive_verification import admit
from verify_service.engine import VerifyEngine
from verify_service.rules import judge
from verify_service.server import SERVICE_NAME
from verify_service.service import VerifyServicer

HOT, DRAWN = SamplingParams(1.0), DistributionSpec(draw_from_it=True)
VOCABULARY = 4
P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
SURE_OF_FIRST = torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64)
WEIGHT, DELTA = 0.4, 0.2
RULES = {
    "rejection": Rule("rejection"),
    "ensemble": Rule("ensemble", ensemble_weight=WEIGHT),
    "cactus": Rule("cactus", cactus_delta=DELTA),
}


def law(rule: str, p: Tensor, q: Tensor) -> Tensor:
    """The distribution of a token in the place of a draft that is checked."""
    if rule == "rejection":
        return p
    if rule == "ensemble":
        return WEIGHT * p + (1 - WEIGHT) * q
    found = torch.zeros_like(p)
    for x in range(VOCABULARY):  # drafted
        raised = (p[x] + (2 * DELTA * p[x] * (1 - p[x])).sqrt()).clamp(max=1)
        h = p * (1 - raised) / (1 - p[x])
        h[x] = raised
        accepted = (h[x] / q[x]).clamp(max=1)
        left = (h - q).clamp(min=0)
        found[x] += q[x] * accepted
        if accepted < 1:
            found += q[x] * (1 - accepted) * left / left.sum()
    return found


def chances(confidences: Sequence[float]) -> list[float]:
    """What a pace that knows nothing yet sends of drafts with these confidences."""
    return Acceptance(SharedAcceptance(False, K)).chances(confidences, len(confidences))


def p_value(counts: Sequence[Tensor], laws: Sequence[Tensor]) -> float:
    """Of the chi-squared test that each row of counts follows its law; rare rows do not count."""
    statistic, freedom = 0.0, 0
    for row, chances in zip(counts, laws, strict=True):
        wanted = chances * row.sum()
        if wanted.min() < 5:  # too few for the approximation
            continue
        statistic += (((row - wanted) ** 2) / wanted).sum().item()
        freedom += len(row) - 1
    assert freedom >= len(counts), "most rows are too rare"
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


# --- one step, without a service ------------------------------------------------------------

NEVER_ALONE = StepCosts([MeasuredStep(2, 100), MeasuredStep(3, 150), MeasuredStep(4, 155)])
"""A draft does not pay in a step of two rounds; two of them may."""


def second_row(first: int) -> Tensor:
    """What the drafter says after its first token: it is sure after token 0 alone."""
    sure = torch.tensor([0.97, 0.01, 0.01, 0.01], dtype=torch.float64)
    return sure if first == 0 else torch.full_like(sure, 0.25)


@pytest.mark.parametrize("num_drafts", [1, 2])
@pytest.mark.parametrize("rule", RULES)
def test_a_token_is_not_left_out_for_what_it_is(rule: str, num_drafts: int) -> None:
    """Of two rounds in a step, one without drafts; where a draft is checked, the law is the rule's.

    Of two drafts, the second one's confidence tells what the first one is.
    """
    runs = 1000
    costs = StepCosts([MeasuredStep(1, 70), MeasuredStep(9, 230)])
    if num_drafts == 2:
        costs = NEVER_ALONE
    first = _drawn([SURE_OF_FIRST] * runs, 1)
    second = _drawn([second_row(drawn.token_ids[0]) for drawn in first], 2)
    counts = {True: torch.zeros(VOCABULARY), False: torch.zeros(VOCABULARY)}
    for seed, both in enumerate(zip(first, second, strict=True)):
        drawn = [*both][:num_drafts]
        drafts = [each.token_ids[0] for each in drawn]
        confidences = [each.confidences[0] for each in drawn]
        survivals = chances(confidences)
        kept, _ = admit([survivals, []], 2 + num_drafts, costs)
        q = decode(
            [each.distributions[0] for each in drawn[:kept]], drafts[:kept], VOCABULARY,
            renormalise=True,
        )  # fmt: skip
        verdict = judge(
            RULES[rule], drafts[:kept], P.log().expand(kept + 1, -1), sampling=HOT, seed=seed,
            start_position=1, draft_distributions=q if kept else None,
        )  # fmt: skip
        token = drafts[0] if verdict.num_accepted else verdict.next_token_id
        counts[kept > 0][token] += 1
    laws = {True: law(rule, P, SURE_OF_FIRST), False: P}
    groups = [kept for kept in counts if counts[kept].sum()]
    assert p_value([counts[g] for g in groups], [laws[g] for g in groups]) > 1e-5


def _drawn(rows: Sequence[Tensor], position: int) -> list[Drafted]:
    """A token from each row, as drafters draw it, with another seed each."""

    def forward(steps: Sequence[Step]) -> list[Rows]:
        return [Rows(rows[step.slot].log()[None]) for step in steps]

    return stepwise.draw(
        forward,
        [
            Draw(Step(seed, position - 1, [0], 1), HOT, seed, distribution=DRAWN, confidences=True)
            for seed in range(len(rows))
        ],
    )


# --- a running service, whose sessions share steps --------------------------------------------

TARGET = torch.tensor(
    [[0.4, 0.3, 0.2, 0.1], [0.2, 0.5, 0.1, 0.2], [0.25, 0.2, 0.3, 0.25], [0.15, 0.15, 0.2, 0.5]],
    dtype=torch.float64,
)
"""What follows each token."""
DRAFT = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.1, 0.05, 0.05, 0.8]],
    dtype=torch.float64,
)
K, SESSIONS, LENGTH = 3, 6, 130
CROWDED = StepCosts([MeasuredStep(1, 500), MeasuredStep(9, 1300), MeasuredStep(64, 6800)])
"""Of six rounds in a step, drafts pay whose chance is above 0.6; of fewer, less likely ones."""
TOKENIZER = TokenizerBundle(b"", "", (), (), None, "", "{}")


def following(table: Tensor) -> ScriptedModel:
    """A model whose next token depends on the last one."""
    rows = table.log().tolist()
    return ScriptedModel(lambda tokens: rows[tokens[-1]], SESSIONS, LENGTH + K + 2)


@dataclass
class Tally:
    """Tokens by what precedes them, in the places of checked drafts and elsewhere."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(2, VOCABULARY, VOCABULARY))
    num_left_out: int = 0

    def add(self, before: int, drafts: Sequence[int], verdict: Verdict) -> list[int]:
        """Count a round's tokens; return them."""
        self.num_left_out += len(drafts) - len(verdict.decisions)
        tokens = [*drafts[: verdict.num_accepted], verdict.next_token_id]
        for index, token in enumerate(tokens):
            self.counts[int(index < len(verdict.decisions)), before, token] += 1
            before = token
        return tokens


class Generating:
    """A session of the service, with a drafter of its own."""

    def __init__(self, stub, model: ScriptedModel, rule: Rule, seed: int) -> None:
        self.tokens, self.round_id, self.call = [seed % VOCABULARY], 0, stub.Verify()
        self.model = model
        self.open = VerifyOpen(self.tokens[:], 1, rule, HOT, seed)
        self.drafter = ModelDrafter(model, ()).open(
            DraftOpen(self.tokens[:], HOT, seed, distribution=DRAWN)
        )

    async def run(self, tally: Tally) -> None:
        await self.call.write(wire.encode(self.open))
        while len(self.tokens) < LENGTH:
            length, drafted = len(self.tokens), self.drafted()
            self.round_id += 1
            await self.call.write(
                wire.encode(DraftDistributions(self.round_id, length, drafted.distributions))
            )
            round_ = VerifyRound(
                self.round_id, length, [], drafted.token_ids,
                draft_survivals=chances(drafted.confidences),
            )  # fmt: skip
            await self.call.write(wire.encode(round_))
            message = await self.call.read()
            assert message is not grpc.aio.EOF, await self.call.details()
            verdict = replace(wire.decode(Verdict, message), start_length=length)
            self.tokens += tally.add(self.tokens[-1], drafted.token_ids, verdict)
            self.drafter.move(length, self.tokens[length:])
        self.call.cancel()
        self.drafter.close()

    def drafted(self) -> Drafted:
        work, whole = self.drafter.propose(K), Drafted([])
        item = next(work, None)
        while item is not None:
            if isinstance(item, Drafted):
                whole, item = whole.joined(item), next(work, None)
                continue
            try:
                item = work.send(*self.model.draw([item]))
            except StopIteration:
                break
        return whole


@pytest.mark.parametrize("rule", RULES)
async def test_sessions_that_share_steps_follow_the_rules_law(rule: str) -> None:
    target, tally = following(TARGET), Tally()
    engine = VerifyEngine(target, TOKENIZER, max_queue=64)
    engine.start().result()
    engine.costs = CROWDED
    servicer = VerifyServicer(engine, TOKENIZER, VerifySettings(model="x"))
    add = verify_pb2_grpc.add_VerifyServiceServicer_to_server
    server = rpc.GrpcServer("127.0.0.1", 0, [(add, servicer)], [SERVICE_NAME])
    port = await server.start()
    drafter = following(DRAFT)
    try:
        async with rpc.connect(f"127.0.0.1:{port}") as channel:
            stub = verify_pb2_grpc.VerifyServiceStub(channel)
            for first in range(0, 2 * SESSIONS, SESSIONS):
                seeds = range(first, first + SESSIONS)
                crowd = [Generating(stub, drafter, RULES[rule], seed) for seed in seeds]
                await asyncio.gather(*(each.run(tally) for each in crowd))
    finally:
        await server.stop(0)
        await asyncio.to_thread(engine.stop)
    shared = sum(len(steps) > 1 for steps in target.calls)
    assert shared > len(target.calls) / 4
    assert tally.num_left_out > 50, "all drafts were checked"
    checked = [law(rule, p, q) for p, q in zip(TARGET, DRAFT, strict=True)]
    found = [*tally.counts[1], *tally.counts[0]]
    assert p_value(found, [*checked, *TARGET]) > 1e-5
    if rule != "rejection":
        assert p_value(found, [*TARGET, *TARGET]) < 1e-5, "the law is another one"
    assert math.isclose(tally.counts.sum().item(), 2 * SESSIONS * (LENGTH - 1), rel_tol=0.1)
