"""Eager mode: after all retractions, a client has the text it would get without eager mode."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec.values.generation import FinishReason, Retract
from tests.examples import examples
from tests.orchestrator.fakes import Fakes, plan_of
from tests.orchestrator.tokenizer import TOKENIZER
from tests.orchestrator.world import EOS, World

# Whole characters, halves of characters, and letters that stop strings are made of.
ALPHABET = tuple(TOKENIZER.encode("数😀ab \n", add_special_tokens=False))


class Client:
    """Does what a client must: appends, cuts, and never revisits a final token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.texts: list[str] = []
        self.data = b""
        self.num_final = 0
        self.num_retracts = 0

    def take(self, event) -> None:
        if isinstance(event, Retract):
            cut = event
            assert self.num_final <= cut.output_token_index < len(self.tokens)
            del self.tokens[cut.output_token_index :], self.texts[cut.output_token_index :]
            self.data = self.data[: cut.text_byte_offset]
            self.data.decode()
            assert self.data == "".join(self.texts).encode()
            self.num_retracts += 1
            return
        chunk = event
        assert "".join(chunk.token_texts) == chunk.text
        self.tokens += chunk.token_ids
        self.texts += chunk.token_texts
        self.data += chunk.text.encode()
        assert self.num_final <= chunk.num_final_tokens <= len(self.tokens)
        self.num_final = chunk.num_final_tokens


async def generate(world, plan, window_size, offers):
    fakes = Fakes(world, plan, TOKENIZER, window_size)
    client = Client()
    step = 0
    async for _, update in fakes.run():
        for event in update.events:
            client.take(event)
        if not plan.reporting.eager:
            assert client.num_final == len(client.tokens)
            assert client.num_retracts == 0
        step += 1
        if offers:
            fakes.offer.k = offers[step % len(offers)]
    return fakes, client


worlds = st.builds(
    World,
    seed=st.integers(0, 2**32),
    alphabet=st.just(ALPHABET),
    agreement=st.sampled_from([0.5, 0.8, 0.9]),
    tolerance=st.sampled_from([0.5, 1.0]),
    eos_share=st.sampled_from([0.0, 0.02]),
)


@settings(max_examples=examples(50))
@given(
    world=worlds,
    window_size=st.integers(1, 8),
    k=st.integers(1, 6),
    max_tokens=st.integers(1, 40),
    offers=st.lists(st.sampled_from([0, 1, 2, 1000, 1000, 1000]), max_size=7),
    ignore_eos=st.booleans(),
    stop=st.lists(st.sampled_from(["ab", "a b", "b数", "\na", "aab😀"]), max_size=2),
)
def test_replaying_gives_the_same_output(
    world, window_size, k, max_tokens, offers, ignore_eos, stop
):
    def plan(eager):
        return plan_of(
            num_speculative_tokens=k,
            max_tokens=max_tokens,
            ignore_eos=ignore_eos,
            stop=tuple(stop),
            eager=eager,
        )

    async def both():
        return (
            await generate(world, plan(False), window_size, offers),
            await generate(world, plan(True), window_size, offers),
        )

    (calm, calm_client), (eager, eager_client) = asyncio.run(both())
    assert eager_client.tokens == calm_client.tokens
    assert eager_client.data == calm_client.data
    assert eager_client.texts == calm_client.texts
    assert eager_client.num_final == calm_client.num_final == len(calm_client.tokens)
    for name in ("finish_reason", "stop_reason", "num_final_tokens", "num_tokens"):
        assert getattr(eager.output, name) == getattr(calm.output, name)
    for name in ("num_rollbacks", "num_loose_tokens", "num_rejected_tokens", "num_rounds"):
        assert getattr(eager.ledger.metrics, name) == getattr(calm.ledger.metrics, name)
    text = calm_client.data.decode()
    assert not any(s in text for s in stop)
    if calm.output.finish_reason is FinishReason.LENGTH:
        assert text == TOKENIZER.decode(calm_client.tokens)
    elif calm.output.stop_reason is None:
        assert calm_client.tokens[-1] == EOS
