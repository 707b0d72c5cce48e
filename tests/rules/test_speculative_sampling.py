"""`rejection` follows the target's distribution.

The target and the drafter are tables: what follows depends on the last token alone. Runs differ by
position instead of by seed, so that drafting is one tensor operation. A run emits two tokens, in
one round of two drafts or, if the first is rejected, in two rounds.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from flyspec.engine.distributions import Distributions, decode, round_off
from flyspec.rules import Rule
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from verify_service.rules import judge

VOCABULARY = 6
SHORT, LONG = 6_000, 50_000
SEED = 11
HOT = SamplingParams(0.9)
STRIDE = 4  # positions of a run


@dataclass
class Models:
    """Raw logits after each token, the last row at the beginning: [V + 1, V]."""

    target: Tensor
    draft: Tensor

    @staticmethod
    def random() -> Models:
        generator = torch.Generator().manual_seed(5)
        shape = (VOCABULARY + 1, VOCABULARY)
        target = 0.5 * torch.randn(shape, generator=generator)
        return Models(target, target + 0.8 * torch.randn(shape, generator=generator))


class Drafter:
    """Draws from what it sends; None for `top_k` proposes its favourite, as lookup does."""

    def __init__(self, models: Models, top_k: int | None) -> None:
        self.logits = models.draft / HOT.temperature
        self.spec = None if top_k is None else DistributionSpec(top_k, draw_from_it=True)

    def draw(self, contexts: Tensor, positions: list[int]) -> Tensor:
        rows = self.logits[contexts]
        if self.spec is None:
            return rows.argmax(dim=-1)
        return round_off(rows, self.spec).draw(positions, SEED)

    def read(self) -> list[Distributions]:
        """Return q after each token as the verify service knows it."""
        if self.spec is None:
            favourites = self.logits.argmax(dim=-1).tolist()
            points = [
                [0.0 if t == f else -torch.inf for t in range(VOCABULARY)] for f in favourites
            ]
            return [Distributions(torch.tensor([row]), None) for row in points]
        sent = round_off(self.logits, self.spec)
        drafts = sent.log_probs.argmax(dim=-1).tolist()  # of any token; sent only to be checked
        if sent.token_ids is not None:
            drafts = [int(ids[d]) for ids, d in zip(sent.token_ids, drafts, strict=True)]
        return [
            decode([q], [d], VOCABULARY, renormalise=True)
            for q, d in zip(sent.encode(), drafts, strict=True)
        ]


def emit(models: Models, drafter: Drafter, runs: int, rule: str | Rule = "rejection") -> Tensor:
    """The first two tokens of each run: [runs, 2]."""
    begin = VOCABULARY
    starts = [STRIDE * run for run in range(runs)]
    first = drafter.draw(torch.full((runs,), begin), starts)
    second = drafter.draw(first, [start + 1 for start in starts])
    known = drafter.read()
    emitted = []
    for run, drafts in enumerate(torch.stack([first, second], dim=1).tolist()):
        contexts = [begin, *drafts]
        q = joined([known[context] for context in contexts[:-1]])
        verdict = judge(
            rule, drafts, models.target[contexts], sampling=HOT, seed=SEED,
            start_position=starts[run], draft_distributions=q,
        )  # fmt: skip
        emitted.append([*drafts[: verdict.num_accepted], verdict.next_token_id][:2])
    # A second round for those whose first draft was rejected, drafted with the noise of before.
    again = [run for run, tokens in enumerate(emitted) if len(tokens) == 1]
    contexts = [emitted[run][0] for run in again]
    positions = [starts[run] + 1 for run in again]
    redrafted = drafter.draw(torch.tensor(contexts), positions).tolist()
    for run, context, position, draft in zip(again, contexts, positions, redrafted, strict=True):
        verdict = judge(
            rule, [draft], models.target[[context, draft]], sampling=HOT, seed=SEED,
            start_position=position, draft_distributions=known[context],
        )  # fmt: skip
        emitted[run].append(draft if verdict.num_accepted else verdict.next_token_id)
    return torch.tensor(emitted)


def joined(parts: list[Distributions]) -> Distributions:
    ids = [part.token_ids for part in parts]
    log_probs = torch.cat([part.log_probs for part in parts])
    return Distributions(log_probs, None if ids[0] is None else torch.cat(ids))  # type: ignore[arg-type]


def chi_squared(counts: Tensor, wanted: Tensor) -> float:
    """The p-value; each cell must be expected often enough for the approximation."""
    assert wanted.min() > 5
    statistic = ((counts - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((wanted.numel() - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


def targets_of(models: Models) -> Tensor:
    return (models.target.double() / HOT.temperature).softmax(dim=-1)


def p_values(p: Tensor, emitted: Tensor) -> tuple[float, float]:
    """Of the first token, and of both together, if they should follow p: [V + 1, V]."""
    runs = emitted.shape[0]
    first = p[VOCABULARY]
    counts = torch.bincount(emitted[:, 0], minlength=VOCABULARY).double()
    pairs = torch.bincount(emitted[:, 0] * VOCABULARY + emitted[:, 1], minlength=VOCABULARY**2)
    both = (first[:, None] * p[:VOCABULARY]).flatten()
    return chi_squared(counts, first * runs), chi_squared(pairs.double(), both * runs)


FORMS = {"whole": 0, "top 3": 3, "point mass": None}


def check(form: str, runs: int) -> None:
    models = Models.random()
    emitted = emit(models, Drafter(models, FORMS[form]), runs)
    first, both = p_values(targets_of(models), emitted)
    assert first > 0.001
    assert both > 0.001


@pytest.mark.parametrize("form", FORMS)
def test_output_follows_the_target(form: str) -> None:
    check(form, SHORT)


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_output_follows_the_target_over_50000_draws(form: str) -> None:
    check(form, LONG)
