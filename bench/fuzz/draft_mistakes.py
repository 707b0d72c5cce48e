"""What a session of the draft service must be refused for: its messages, then the statuses."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from bench.fuzz.draft_session import GoodDraftSession
from bench.fuzz.script import INVALID, PREFIX
from flyspec.v1 import draft_pb2

NOT_FOUND = frozenset({"NOT_FOUND"})


Refused = tuple[Any, ...]


def advance_first(s: GoodDraftSession, rng: Random) -> Refused:
    """A round before the opening."""
    return (s.advance(), INVALID)


def nothing_set(s: GoodDraftSession, rng: Random) -> Refused:
    """A message with nothing in it."""
    return (draft_pb2.DraftRequest(), INVALID)


def no_tokens(s: GoodDraftSession, rng: Random) -> Refused:
    """An empty sequence."""
    m = s.open()
    m.open.token_ids.clear()
    m.open.prompt_length = 0
    return (m, INVALID)


def bad_open_ids(s: GoodDraftSession, rng: Random) -> Refused:
    """Ids beyond the vocabulary."""
    m = s.open()
    m.open.drafter = "model"
    m.open.token_ids.append(rng.choice((s.facts.vocab_size, 1 << 31, (1 << 32) - 1)))
    return (m, INVALID)


def too_long(s: GoodDraftSession, rng: Random) -> Refused:
    """A sequence beyond the context."""
    m = s.open()
    m.open.drafter = "model"
    extra = 1 if rng.random() < 0.9 else rng.choice((10_000, 2_000_000))
    m.open.token_ids[:] = [5] * (s.facts.context_length + extra)
    return (m, INVALID)


def bad_prompt_length(s: GoodDraftSession, rng: Random) -> Refused:
    """A prompt longer than the sequence."""
    m = s.open()
    m.open.prompt_length = rng.choice((len(s.known) + 1, (1 << 32) - 1))
    return (m, INVALID)


def bad_sampling(s: GoodDraftSession, rng: Random) -> Refused:
    """Sampling parameters out of range."""
    m = s.open()
    name, values = rng.choice(
        [
            ("temperature", (-1.0, math.nan, math.inf, 1e-9)),
            ("top_p", (0.0, 1.5, math.nan)),
            ("min_p", (-0.1, 1.1, math.nan)),
            ("repetition_penalty", (0.0, 11.0, math.nan)),
            ("presence_penalty", (2.5, math.nan)),
            ("frequency_penalty", (-2.5, math.nan)),
            ("top_k", (1 << 31, (1 << 32) - 1)),
        ]
    )
    setattr(m.open.sampling, name, rng.choice(values))
    return (m, INVALID)


def bad_bias(s: GoodDraftSession, rng: Random) -> Refused:
    """Biases out of range, of tokens that do not exist, or too many."""
    m = s.open()
    bias = m.open.sampling.logit_bias
    match rng.randrange(3):
        case 0:
            bias[5] = rng.choice((math.nan, math.inf, 101.0))
        case 1:
            m.open.drafter = "model"
            bias[s.facts.vocab_size] = 1.0
        case _:
            for token in range(rng.choice((1025, 20_000))):
                bias[token] = 1.0
    return (m, INVALID)


def bad_spec(s: GoodDraftSession, rng: Random) -> Refused:
    """Too many of the most likely tokens wanted."""
    m = s.open()
    m.open.distribution.top_k = rng.choice((1025, (1 << 32) - 1))
    return (m, INVALID)


def no_such_drafter(s: GoodDraftSession, rng: Random) -> Refused:
    """A drafter that does not exist."""
    m = s.open()
    m.open.drafter = rng.choice(("nobody", "\0", "é😀" * 500, "Model"))
    return (m, NOT_FOUND)


def open_twice(s: GoodDraftSession, rng: Random) -> Refused:
    """A second opening."""
    return (s.open(), INVALID)


def keep_too_much(s: GoodDraftSession, rng: Random) -> Refused:
    """More kept than is held."""
    m = s.advance()
    m.advance.keep_length = s.facts.context_length - 10
    return (m, PREFIX)


def keep_beyond(s: GoodDraftSession, rng: Random) -> Refused:
    """More kept than any session can hold."""
    m = s.advance()
    m.advance.keep_length = rng.choice((1 << 31, (1 << 32) - 1))
    return (m, INVALID | PREFIX)


def late_round(s: GoodDraftSession, rng: Random) -> Refused:
    """A round that came before."""
    first, again = s.advance(), s.advance()
    again.advance.round_id = first.advance.round_id - rng.choice((0, 0, 1))
    return (first, again, PREFIX)


def keep_nothing(s: GoodDraftSession, rng: Random) -> Refused:
    """Nothing kept and nothing appended."""
    m = s.advance()
    m.advance.keep_length = 0
    m.advance.append_token_ids.clear()
    return (m, INVALID)


def propose_too_much(s: GoodDraftSession, rng: Random) -> Refused:
    """More tokens wanted than a round may have."""
    m = s.advance()
    m.advance.max_tokens = rng.choice((s.facts.max_drafts + 1, 1 << 31, (1 << 32) - 1))
    return (m, INVALID)


def append_too_much(s: GoodDraftSession, rng: Random) -> Refused:
    """More appended than any drafter holds."""
    m = s.advance()
    m.advance.append_token_ids[:] = [5] * ((1 << 20) + rng.choice((1, 1_000_000)))
    return (m, INVALID)


BAD_OPENS = [
    advance_first, nothing_set, no_tokens, bad_open_ids, too_long, bad_prompt_length, bad_sampling,
    bad_bias, bad_spec, no_such_drafter,
]  # fmt: skip
BAD_ADVANCES = [
    nothing_set, open_twice, keep_too_much, keep_beyond, late_round, keep_nothing,
    propose_too_much, append_too_much,
]  # fmt: skip
