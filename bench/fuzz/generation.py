"""Scripts for the orchestrator's `GenerationService`."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from random import Random

from bench.fuzz.facts import (
    CANCEL,
    LEAVE,
    PAUSE,
    READ,
    Facts,
    bare,
    one_of,
    send,
    spoiled,
    unary_junk,
)
from bench.fuzz.script import BLAMELESS, FINE, INVALID, NOT_FOUND, Script
from bench.fuzz.system import SYSTEM_METHODS
from bench.fuzz.values import mutate, spoil_bias, spoil_rule, spoil_sampling
from flyspec.rules.presets import RULE_PRESETS
from flyspec.v1 import generation_pb2

METHOD = "/flyspec.v1.GenerationService/Generate"
UNARY = [
    bare("/flyspec.v1.GenerationService/ListModels", generation_pb2.ListModelsRequest),
    *SYSTEM_METHODS,
]
PATIENCE_S = 2.0
"""A request with a field changed may ask for a text as long as the context: nobody waits for it."""


class GenerationSource:
    """Requests for text: right, wrong in one place, spoiled, abandoned."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def script(self, rng: Random) -> Script:
        """A call."""
        return one_of(
            rng,
            (
                (8, self._good),
                (45, self._bad),
                (25, self._spoiled),
                (8, self._bytes),
                (7, self._abandoned),
                (7, partial(unary_junk, methods=UNARY)),
            ),
        )

    def _good(self, rng: Random) -> Script:
        return Script(METHOD, (send(_request(self._facts, rng)),), "a good request", FINE, 2)

    def _bad(self, rng: Random) -> Script:
        message = _request(self._facts, rng)
        kind, expects = rng.choice(_SPOILERS)(message, self._facts, rng)
        return Script(METHOD, (send(message),), kind, expects)

    def _spoiled(self, rng: Random) -> Script:
        message = _request(self._facts, rng)
        for _ in range(rng.choice((1, 1, 2, 4))):
            mutate(message, rng)
        if not 0 <= message.max_tokens < 50 or not message.HasField("max_tokens"):
            message.max_tokens = rng.choice((3, 3, 3, 3, (1 << 32) - 1))
        return Script(METHOD, (send(message),), "a field changed", BLAMELESS, deadline_s=PATIENCE_S)

    def _bytes(self, rng: Random) -> Script:
        step = spoiled(_request(self._facts, rng).SerializeToString(), rng, 0.7)
        return Script(METHOD, (step,), "bytes spoiled", BLAMELESS, deadline_s=PATIENCE_S)

    def _abandoned(self, rng: Random) -> Script:
        step = send(_request(self._facts, rng))
        script = Script(METHOD, (step,), "cancelled", deadline_s=PATIENCE_S)
        match rng.randrange(6):
            case 0:
                return replace(script, steps=(step, CANCEL))
            case 1:
                return replace(script, steps=(step, READ, CANCEL))
            case 2:
                return replace(script, steps=(step, READ, PAUSE, READ, CANCEL))
            case 3:
                return replace(script, steps=(step, LEAVE), kind="not read")
            case 4:
                return replace(script, steps=(step, step), kind="two requests")
            case _:
                deadline = rng.choice((0.001, 0.02, 0.1))
                return replace(script, kind="its deadline passes", deadline_s=deadline)


def _request(facts: Facts, rng: Random) -> generation_pb2.GenerateRequest:
    """A right request for a few tokens."""
    m = generation_pb2.GenerateRequest()
    match rng.randrange(3):
        case 0:
            m.text = rng.choice(("The cat sat on the", "1, 2, 3, 4,", "é😀 數學\n\0", "x" * 60))
        case 1:
            text = rng.choice(facts.texts)
            m.token_ids.ids.extend(text[: rng.randint(1, len(text))])
        case _:
            m.chat.messages.add(role="user", content="How many are 3 apples and 4 apples?")
    m.max_tokens = rng.randint(1, 5)
    if rng.random() < 0.4:
        m.sampling.temperature = rng.choice((0.0, 0.7, 1.0))
        m.sampling.top_p = rng.choice((1.0, 0.9))
    if rng.random() < 0.5:
        m.seed = rng.choice((0, 1, (1 << 64) - 1))
    if rng.random() < 0.6:
        m.speculation.rule.name = rng.choice(list(RULE_PRESETS))
    if rng.random() < 0.5:
        m.speculation.num_speculative_tokens = rng.choice((0, 2, 4, 15))
    m.speculation.drafter = rng.choice(("", *facts.drafters))
    m.speculation.eager = rng.random() < 0.2
    m.return_rounds = rng.random() < 0.2
    m.ignore_eos = rng.random() < 0.5
    if rng.random() < 0.2:
        m.logprobs = rng.choice((0, 3, 20))
    if rng.random() < 0.2:
        m.stop.append(rng.choice(("\n", "7", "nowhere")))
    return m


# --- what makes a request wrong: the name of the mistake, and the statuses that it must get -------

Mistake = tuple[str, frozenset[str]]


def _bad_prompt(m: generation_pb2.GenerateRequest, facts: Facts, rng: Random) -> Mistake:
    match rng.randrange(6):
        case 0:
            m.ClearField("prompt")
            return "no prompt", INVALID
        case 1:
            m.text = ""
            return "an empty text", INVALID
        case 2:
            m.token_ids.ClearField("ids")
            m.token_ids.SetInParent()
            return "no tokens", INVALID
        case 3:
            m.token_ids.ids.append(rng.choice((facts.vocab_size, (1 << 32) - 1)))
            return "ids beyond the vocabulary", INVALID
        case 4:
            extra = 0 if rng.random() < 0.9 else 1_000_000
            m.token_ids.ids[:] = [5] * (facts.context_length + extra)
            return "ids beyond the context", INVALID
        case _:
            m.chat.ClearField("messages")
            m.chat.SetInParent()
            return "an empty chat", INVALID


def _absurd_prompt(m: generation_pb2.GenerateRequest, facts: Facts, rng: Random) -> Mistake:
    word = rng.choice(("a b c ", "😀", "\0", "Żółć "))
    text = word * (20_000 if rng.random() < 0.95 else 1_000_000)
    if rng.random() < 0.5:
        m.text = text
    else:
        m.chat.ClearField("messages")
        m.chat.messages.add(role="user", content=text)
    return "an absurd text", INVALID


def _bad_sampling(m: generation_pb2.GenerateRequest, facts: Facts, rng: Random) -> Mistake:
    match rng.randrange(9):
        case 0:
            m.sampling.min_tokens = rng.choice((6, (1 << 32) - 1))
        case 1:
            spoil_bias(m.sampling.logit_bias, facts.vocab_size, rng)
        case _:
            spoil_sampling(m.sampling, rng)
    return "sampling parameters out of range", INVALID


def _bad_rule(m: generation_pb2.GenerateRequest, facts: Facts, rng: Random) -> Mistake:
    spoil_rule(m.speculation.rule, ("nothing",), facts.vocab_size, rng)
    return "a rule that is none", INVALID | NOT_FOUND


def _bad_speculation(m: generation_pb2.GenerateRequest, facts: Facts, rng: Random) -> Mistake:
    match rng.randrange(3):
        case 0:
            m.speculation.drafter = rng.choice(("nobody", "\0", "é" * 5000))
            return "a drafter that does not exist", NOT_FOUND
        case 1:
            m.speculation.num_speculative_tokens = rng.choice((65, 1 << 31, (1 << 32) - 1))
        case _:
            m.speculation.max_loose_cost_nats = rng.choice((math.nan, -1.0, math.inf))
    return "speculation out of range", INVALID


def _bad_output(m: generation_pb2.GenerateRequest, facts: Facts, rng: Random) -> Mistake:
    match rng.randrange(4):
        case 0:
            m.max_tokens = 0
        case 1:
            m.logprobs = rng.choice((21, (1 << 32) - 1))
        case 2:
            m.stop.append(rng.choice(("", "y" * 100_000)))
        case _:
            m.stop.extend(["a"] * rng.choice((1000, 100_000)))
    return "an output that cannot be had", INVALID


_SPOILERS = [
    _bad_prompt, _bad_prompt, _absurd_prompt, _bad_sampling, _bad_sampling, _bad_rule,
    _bad_speculation, _bad_output,
]  # fmt: skip
