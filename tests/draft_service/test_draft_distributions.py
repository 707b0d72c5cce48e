"""Distributions sent with drafts: from the drafters, and over gRPC."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.multi_level import MultiLevelDrafter
from flyspec.engine.distributions import decode, encode
from flyspec.engine.loading import LoadedModel
from flyspec.engine.logits import History, process_logits
from flyspec.engine.sampling import DRAFT_STREAM, choose_processed, sample_among
from flyspec.values.rounds import DistributionSpec, DraftOpen
from flyspec.values.tokens import SamplingParams, TokenDistribution
from tests.draft_service.draft_harness import (
    EOS,
    GREEDY,
    PENALTIES,
    SAMPLINGS,
    SPECS,
    VOCAB_SIZE,
    CountingRunner,
    StartService,
    drive,
    drive_all,
    lookup_drafter,
)


def logits_behind(loaded: LoadedModel, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = loaded.model(torch.tensor([tokens])).logits[0, -1:]
    return logits


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sampling", [*SAMPLINGS, *PENALTIES])
@pytest.mark.parametrize("kind", [ModelDrafter, MultiLevelDrafter])
def test_each_token_was_drawn_from_the_distribution_sent_with_it(
    kind: Any,
    loaded: LoadedModel,
    runner: CountingRunner,
    prompt: list[int],
    sampling: SamplingParams,
    spec: DistributionSpec,
) -> None:
    """From the sequence alone, one forward per token: the distribution, and the draw from it."""
    session = kind(runner, [EOS]).open(DraftOpen(prompt, sampling, 21, "", 3, spec))
    tokens, _, distributions = drive_all(runner, session, 12)
    assert tokens
    assert len(distributions) == len(tokens)
    sequence = list(prompt)
    for token, sent in zip(tokens, distributions, strict=True):
        history, at = History(sequence, 3, [EOS]), len(sequence)
        processed = process_logits(logits_behind(loaded, sequence), sampling, history)
        if not spec.draw_from_it:
            assert token == choose_processed(processed, sampling, [at], 21).item()
            assert closely(sent, encode(processed, spec)[0])
        elif sampling.greedy:
            assert sent == TokenDistribution()
            assert token == processed.argmax().item()
        else:
            q = decode([sent], [token], VOCAB_SIZE, renormalise=True)
            drawn = sample_among(q.log_probs, q.token_ids, [at], 21, DRAFT_STREAM)
            assert drawn.item() == token
            (expected,) = encode(processed, spec)
            assert closely(sent, expected) or not (sent.token_ids and expected.token_ids)
        sequence.append(token)


def closely(one: TokenDistribution, other: TokenDistribution) -> bool:
    """Whether they are equal up to a unit in the last place: forwards of other shapes differ."""
    values, others = (np.frombuffer(q.log_probs, "<f2").astype(np.float32) for q in (one, other))
    return one.token_ids == other.token_ids and np.allclose(values, others, rtol=2e-3, atol=1e-6)


def test_drafts_drawn_from_what_is_sent_have_noise_of_their_own(
    runner: CountingRunner, prompt: list[int]
) -> None:
    def proposal(spec: DistributionSpec | None) -> list[int]:
        open_ = DraftOpen(prompt, SamplingParams(1.0), 4, distribution=spec)
        session = ModelDrafter(runner, []).open(open_)
        tokens, _ = drive(runner, session, 12)
        session.close()
        return tokens

    without = proposal(None)
    assert proposal(DistributionSpec(5)) == without
    assert proposal(DistributionSpec(0, draw_from_it=True)) != without


def test_prompt_lookup_sends_point_masses() -> None:
    open_ = DraftOpen([1, 2, 3, 1, 2], GREEDY, 0, distribution=DistributionSpec(4, True))
    (drafted,) = lookup_drafter().open(open_).propose(3)
    assert list(drafted.distributions) == [TokenDistribution()] * 3


async def test_chunks_of_distributions_are_bounded(
    service_with: StartService, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 bytes each: three fit into 2,000; one larger than the bound goes alone."""
    async with service_with(chunk_tokens=64) as service:
        whole = None
        for bound, most in [(1 << 20, 64), (2000, 3), (500, 1)]:
            monkeypatch.setattr("draft_service.proposal.MAX_CHUNK_BYTES", bound)
            client = await service.client().open(prompt, distribution=DistributionSpec())
            chunks = await client.advance(len(prompt), max_tokens=20)
            client.call.cancel()
            assert max(len(chunk.token_ids) for chunk in chunks) == min(most, 20)
            assert [chunk.last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
            position, flat = len(prompt), []
            for chunk in chunks:
                assert chunk.start_position == position
                assert len(chunk.distributions) == len(chunk.token_ids) == len(chunk.origins)
                position += len(chunk.token_ids)
                flat += zip(chunk.token_ids, chunk.origins, chunk.distributions, strict=True)
            assert whole in (None, flat)
            whole = flat
