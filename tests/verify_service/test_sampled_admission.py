"""Rules that draw follow, where steps leave drafts out, the law that they state.

Whether a drafted position is checked may depend on the drafts before it, never on the draft itself:
to leave a token out for being unlikely, and then to draw from the target, is a selection.
"""

import asyncio
import math
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from draft_service.drafters.model import ModelDrafter
from flyspec.rules import Rule
from flyspec.step_costs import StepCosts
from flyspec.values.admin import MeasuredStep
from flyspec.values.rounds import DistributionSpec, DraftOpen, VerifyRound
from flyspec.values.tokens import SamplingParams, TokenDistribution
from orchestrator.pace.acceptance import Acceptance, SharedAcceptance
from tests.draft_service.draft_harness import run
from tests.scripted import ScriptedModel
from tests.verify_service.sessions import answers, engine_over, opening, tokenizer_of

HOT, WHOLE = SamplingParams(1.0), DistributionSpec(draw_from_it=True)
VOCABULARY = 4
WEIGHT, DELTA = 0.4, 0.2
RULES = {
    "rejection": Rule("rejection"),
    "ensemble": Rule("ensemble", ensemble_weight=WEIGHT),
    "cactus": Rule("cactus", cactus_delta=DELTA),
}
FORMS = {"whole": WHOLE, "two of four": DistributionSpec(2, draw_from_it=True), "point mass": None}
"""Forms of the draft's distribution; a point mass is what lookup sends."""
TARGET = torch.tensor(
    [[0.4, 0.3, 0.2, 0.1], [0.2, 0.5, 0.1, 0.2], [0.25, 0.2, 0.3, 0.25], [0.15, 0.15, 0.2, 0.5]],
    dtype=torch.float64,
)
"""Tokens that follow each token."""
DRAFT = torch.tensor(
    [[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.3, 0.3, 0.2, 0.2], [0.1, 0.05, 0.05, 0.8]],
    dtype=torch.float64,
)
K, SESSIONS, LENGTH = 3, 6, 130
CROWDED = StepCosts([MeasuredStep(1, 500), MeasuredStep(9, 1300), MeasuredStep(64, 6800)])
"""Of six rounds in a step, drafts pay whose chance is above 0.6; of fewer, less likely ones."""


def law(rule, p, q):
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


def chances(confidences):
    """The part of drafts with these confidences that a pace sends which knows nothing yet."""
    return Acceptance(SharedAcceptance(False, K)).chances(confidences, len(confidences))


def p_value(counts, laws):
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


def following(table):
    """A model whose next token depends on the last one."""
    rows = table.log().tolist()
    return ScriptedModel(lambda tokens: rows[tokens[-1]], SESSIONS, LENGTH + K + 2)


@dataclass
class Tally:
    """Tokens by what precedes them, in the places of checked drafts and elsewhere."""

    counts: Tensor = field(default_factory=lambda: torch.zeros(2, VOCABULARY, VOCABULARY))
    num_left_out: int = 0

    def add(self, before, drafts, verdict):
        """Count a round's tokens; return them."""
        self.num_left_out += len(drafts) - len(verdict.decisions)
        tokens = [*drafts[: verdict.num_accepted], verdict.next_token_id]
        for index, token in enumerate(tokens):
            self.counts[int(index < len(verdict.decisions)), before, token] += 1
            before = token
        return tokens


class Generating:
    """A session of the engine, with a drafter of its own; `spec` is one of `FORMS`."""

    def __init__(self, engine, model, rule, spec, seed):
        self.tokens, self.engine, self.model, self.spec = [seed % VOCABULARY], engine, model, spec
        self.session = engine.open(opening(self.tokens[:], rule, HOT, seed))
        self.drafter = ModelDrafter(model, ()).open(
            DraftOpen(self.tokens[:], HOT if spec else SamplingParams(), seed, distribution=spec)
        )

    async def run(self, tally):
        for round_id in range(1, LENGTH):
            length, (_, drafted) = len(self.tokens), run(self.model, self.drafter, K)
            if length >= LENGTH:
                break
            drafts = drafted.token_ids
            sent = drafted.distributions if self.spec else [TokenDistribution()] * K
            survivals = chances(drafted.confidences)
            round_ = VerifyRound(round_id, length, [], drafts, draft_survivals=survivals)
            (verdict,) = await answers(self.engine, self.session, round_, sent)
            self.tokens += tally.add(self.tokens[-1], drafts, verdict)
            self.drafter.move(length, self.tokens[length:])
        self.engine.close(self.session)
        self.drafter.close()


@pytest.mark.parametrize(
    ("rule", "form"),
    [*(("rejection", form) for form in FORMS), ("ensemble", "whole"), ("cactus", "whole")],
)
async def test_sessions_that_share_steps_follow_the_rules_law(rule, form):
    target, drafter, tally = following(TARGET), following(DRAFT), Tally()
    async with engine_over(target, tokenizer_of()) as engine:
        engine.costs = CROWDED
        for first in range(0, 2 * SESSIONS, SESSIONS):
            crowd = [
                Generating(engine, drafter, RULES[rule], FORMS[form], seed)
                for seed in range(first, first + SESSIONS)
            ]
            await asyncio.gather(*(each.run(tally) for each in crowd))
    shared = sum(len(steps) > 1 for steps in target.calls)
    assert shared > len(target.calls) / 4
    assert tally.num_left_out > 50, "all drafts were checked"
    checked = [law(rule, p, q) for p, q in zip(TARGET, DRAFT, strict=True)]
    found = [*tally.counts[1], *tally.counts[0]]
    assert p_value(found, [*checked, *TARGET]) > 1e-5
    if rule != "rejection":
        assert p_value(found, [*TARGET, *TARGET]) < 1e-5, "the law is another one"
    assert math.isclose(tally.counts.sum().item(), 2 * SESSIONS * (LENGTH - 1), rel_tol=0.1)
