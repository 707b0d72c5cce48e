"""Rules that draw follow the law that they state, also in steps that leave drafts out.

Whether a drafted position is checked may depend on the drafts before it, never on the draft itself:
to leave a token out for being unlikely, and then to draw from the target, is a selection.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import grpc
import torch
from torch import Tensor

from draft_service.drafters.model import ModelDrafter
from flyspec import rpc, wire
from flyspec.rules import Rule
from flyspec.step_costs import StepCosts
from flyspec.v1 import verify_pb2_grpc
from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import (
    DistributionSpec,
    DraftDistributions,
    DraftOpen,
    Verdict,
    VerifyOpen,
    VerifyRound,
)
from flyspec.values.tokens import Drafted, SamplingParams
from orchestrator.generation.experience import DrafterExperience
from tests.scripted import ScriptedModel
from tests.verify_service.sessions import engine_over, serving, tokenizer_of

HOT, DRAWN = SamplingParams(1.0), DistributionSpec(draw_from_it=True)
VOCABULARY = 4
WEIGHT = 0.4
RULE = Rule("ensemble", ensemble_weight=WEIGHT)


def p_value(counts: Sequence[Tensor], laws: Sequence[Tensor]) -> float:
    """Of the chi-squared test that each row of counts follows its law."""
    statistic, freedom = 0.0, 0
    for row, chances in zip(counts, laws, strict=True):
        wanted = chances * row.sum()
        assert wanted.min() > 5, "too few for the approximation"
        statistic += (((row - wanted) ** 2) / wanted).sum().item()
        freedom += len(row) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


TARGET = torch.tensor(
    [[0.4, 0.3, 0.2, 0.1], [0.2, 0.5, 0.1, 0.2], [0.25, 0.2, 0.3, 0.25], [0.15, 0.15, 0.2, 0.5]],
    dtype=torch.float64,
)
"""The distribution after each token."""
DRAFT = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.1, 0.05, 0.05, 0.8]],
    dtype=torch.float64,
)
K, SESSIONS, LENGTH = 3, 6, 130
CROWDED = StepCosts([MeasuredStep(1, 500), MeasuredStep(9, 1300), MeasuredStep(64, 6800)])
"""Of six rounds in a step, drafts pay whose chance is above 0.6; of fewer, less likely ones."""
TOKENIZER = tokenizer_of()


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
                draft_survivals=DrafterExperience().survivals(drafted.confidences),
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


async def test_sessions_that_share_steps_follow_the_rules_law() -> None:
    target, drafter, tally = following(TARGET), following(DRAFT), Tally()
    async with (
        engine_over(target, TOKENIZER) as engine,
        serving(engine, TOKENIZER) as address,
        rpc.connect(address) as channel,
    ):
        engine.costs = CROWDED
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        for first in range(0, 3 * SESSIONS, SESSIONS):
            seeds = range(first, first + SESSIONS)
            crowd = [Generating(stub, drafter, RULE, seed) for seed in seeds]
            await asyncio.gather(*(each.run(tally) for each in crowd))
    shared = sum(len(steps) > 1 for steps in target.calls)
    assert shared > len(target.calls) / 4
    assert tally.num_left_out > 50, "all drafts were checked"
    checked = WEIGHT * TARGET + (1 - WEIGHT) * DRAFT
    found = [*tally.counts[1], *tally.counts[0]]
    assert p_value(found, [*checked, *TARGET]) > 1e-5
    assert p_value(found, [*TARGET, *TARGET]) < 1e-5, "the law is another one"
    assert math.isclose(tally.counts.sum().item(), 3 * SESSIONS * (LENGTH - 1), rel_tol=0.1)
