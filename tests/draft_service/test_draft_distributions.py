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
    Service,
    StartService,
    drive,
    drive_all,
    lookup_drafter,
    tokens_of,
)
from tests.waiting import until

PENALIZED = SamplingParams(
    0.9, repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3,
    logit_bias=((7, 2.0),), min_tokens=20,
)  # fmt: skip


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
    tokens, _, distributions = drive_all(runner, session, 25)
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


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(1.0, top_p=0.9), PENALIZED])
@pytest.mark.parametrize("drafter", ["model", "multi_level", "prompt_lookup"])
async def test_distributions_come_with_the_tokens(
    service: Service,
    loaded: LoadedModel,
    prompt: list[int],
    drafter: str,
    sampling: SamplingParams,
    spec: DistributionSpec,
) -> None:
    prompt = [*prompt, *prompt[:4]]  # so that lookup finds something
    client = await service.client().open(prompt, sampling, 9, drafter, 5, spec)
    chunks = await client.advance(len(prompt), max_tokens=12)
    client.call.cancel()
    tokens = tokens_of(chunks)
    sent = [q for chunk in chunks for q in chunk.distributions]
    assert len(sent) == len(tokens) > 0
    q = decode(sent, tokens, VOCAB_SIZE, renormalise=spec.draw_from_it)
    if drafter == "prompt_lookup" or (spec.draw_from_it and sampling.greedy):
        assert sent == [TokenDistribution()] * len(tokens)
        return
    with torch.inference_mode():
        logits = loaded.model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    history = History(prompt, 5, loaded.tokenizer.eos_token_ids)
    processed = process_logits(logits, sampling, history, tokens)
    positions = range(len(prompt), len(prompt) + len(tokens))
    if spec.draw_from_it:
        drawn = sample_among(q.log_probs, q.token_ids, positions, 9, DRAFT_STREAM)
        assert drawn.tolist() == tokens
    else:
        assert choose_processed(processed, sampling, positions, 9).tolist() == tokens
    probs = processed.softmax(-1)
    if spec.top_k and spec.draw_from_it:
        keep = probs.topk(spec.top_k)
        probs = torch.zeros_like(probs).scatter(1, keep.indices, keep.values)
        probs /= probs.sum(-1, keepdim=True)
    elif spec.top_k:
        assert q.token_ids is not None
        assert q.token_ids.shape[1] <= spec.top_k
        probs = torch.zeros_like(probs).scatter(1, q.token_ids, probs.gather(1, q.token_ids))
    got = q.log_probs.double().exp()
    if q.token_ids is not None:
        got = torch.zeros_like(probs).scatter_add(1, q.token_ids, got)
    torch.testing.assert_close(got, probs, rtol=0.01, atol=1e-4)
    await until(lambda: service.active == 0)


@pytest.mark.parametrize("drafter", ["model", "multi_level"])
async def test_no_distributions_unless_asked_for(
    service: Service, prompt: list[int], drafter: str
) -> None:
    client = await service.client().open(prompt, drafter=drafter)
    for chunk in await client.advance(len(prompt)):
        assert chunk.token_ids
        assert chunk.distributions == ()
    client.call.cancel()
    await until(lambda: service.active == 0)


@pytest.mark.parametrize("drafter", ["model", "multi_level"])
async def test_chunks_of_distributions_are_bounded(
    service_with: StartService, prompt: list[int], drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """600 bytes each: three fit into 2,000; one larger than the bound goes alone."""
    async with service_with(chunk_tokens=64) as service:
        whole = None
        for bound, most in [(1 << 20, 64), (2000, 3), (500, 1)]:
            monkeypatch.setattr("draft_service.proposal.MAX_CHUNK_BYTES", bound)
            client = await service.client().open(
                prompt, drafter=drafter, distribution=DistributionSpec()
            )
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
