"""What a session of the verify service must be refused for: its messages, then the statuses."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from bench.fuzz.script import INVALID, PREFIX
from bench.fuzz.values import halves
from bench.fuzz.verify_session import GoodVerifySession
from flyspec.prefix import TokenSequence
from flyspec.v1 import common_pb2, verify_pb2

Refused = tuple[Any, ...]


def _opened_with(session: GoodVerifySession, **fields: object) -> verify_pb2.VerifyRequest:
    message = session.open()
    for name, value in fields.items():
        if isinstance(value, list):
            getattr(message.open, name)[:] = value
        else:
            setattr(message.open, name, value)
    return message


def round_first(s: GoodVerifySession, rng: Random) -> Refused:
    """A round before the opening."""
    return (s.round()[-1], INVALID)


def nothing_set(s: GoodVerifySession, rng: Random) -> Refused:
    """A message with nothing in it."""
    return (verify_pb2.VerifyRequest(), INVALID)


def no_tokens(s: GoodVerifySession, rng: Random) -> Refused:
    """An empty sequence."""
    return (_opened_with(s, token_ids=[]), INVALID)


def bad_open_ids(s: GoodVerifySession, rng: Random) -> Refused:
    """Ids beyond the vocabulary."""
    bad = rng.choice((s.facts.vocab_size, 1 << 31, (1 << 32) - 1))
    return (_opened_with(s, token_ids=[*s.known, bad]), INVALID)


def too_long(s: GoodVerifySession, rng: Random) -> Refused:
    """A sequence beyond the context."""
    extra = 1 if rng.random() < 0.9 else rng.choice((10_000, 2_000_000))
    return (_opened_with(s, token_ids=[5] * (s.facts.context_length + extra)), INVALID)


def bad_prompt_length(s: GoodVerifySession, rng: Random) -> Refused:
    """A prompt longer than the sequence, or none."""
    return (
        _opened_with(s, prompt_length=rng.choice((0, len(s.known) + 1, (1 << 32) - 1))),
        INVALID,
    )


def bad_logprobs(s: GoodVerifySession, rng: Random) -> Refused:
    """Too many log-probabilities wanted."""
    return (_opened_with(s, logprobs=rng.choice((21, 1 << 20, (1 << 32) - 1))), INVALID)


def bad_rule(s: GoodVerifySession, rng: Random) -> Refused:
    """A rule that is none, or has parameters that do not fit."""
    m = s.open()
    rule = m.open.rule
    match rng.randrange(6):
        case 0:
            rule.name = rng.choice(("", "Exact", "\0", "z" * 100_000))
        case 1:
            rule.name, rule.fly_entropy_threshold = "fly", rng.choice((math.nan, -1.0, math.inf))
        case 2:
            rule.name = "fly"
            rule.entropy_measure = rng.choice((3, 99, -1))  # type: ignore[assignment]
        case 3:
            rule.name, rule.margin_threshold = "exact", 0.3
        case 4:
            rule.name, rule.fly_window_size = "fly", rng.choice((1025, (1 << 32) - 1))
        case _:
            rule.name = "fly"
            count = rng.choice((1, 1025, 100_000))
            rule.guarded_token_ids.extend([s.facts.vocab_size if count == 1 else 5] * count)
    return (m, INVALID)


def bad_sampling(s: GoodVerifySession, rng: Random) -> Refused:
    """Sampling parameters out of range."""
    m = s.open()
    sampling = m.open.sampling
    name, values = rng.choice(
        [
            ("temperature", (-1.0, math.nan, math.inf, 1e-9, 1e9)),
            ("top_p", (0.0, -0.5, 1.5, math.nan)),
            ("min_p", (-0.1, 1.1, math.nan)),
            ("repetition_penalty", (0.0, -1.0, 11.0, math.nan, math.inf)),
            ("presence_penalty", (2.5, -2.5, math.nan)),
            ("frequency_penalty", (2.5, -math.inf, math.nan)),
            ("top_k", (1 << 31, (1 << 32) - 1)),
            ("logit_bias", ()),
        ]
    )
    if name == "logit_bias":
        match rng.randrange(3):
            case 0:
                sampling.logit_bias[5] = rng.choice((math.nan, math.inf, 101.0))
            case 1:
                sampling.logit_bias[s.facts.vocab_size] = 1.0
            case _:
                for token in range(1025):
                    sampling.logit_bias[token] = 1.0
    else:
        setattr(sampling, name, rng.choice(values))
    return (m, INVALID)


def open_twice(s: GoodVerifySession, rng: Random) -> Refused:
    """A second opening."""
    return (s.open(), INVALID)


def keep_too_much(s: GoodVerifySession, rng: Random) -> Refused:
    """More kept than is held."""
    m = s.round()[-1]
    m.round.keep_length = rng.choice((s.facts.context_length * 2, 1 << 31, (1 << 32) - 1))
    return (m, PREFIX)


def wrong_hash(s: GoodVerifySession, rng: Random) -> Refused:
    """Another prefix than is held."""
    m = s.round()
    m[-1].round.prefix_hash = (TokenSequence(s.known).hash ^ rng.choice((1, 1 << 63))) or 1
    return (*m, PREFIX)


def late_round(s: GoodVerifySession, rng: Random) -> Refused:
    """A round that came before."""
    first = s.round()
    again = s.round()
    again[-1].round.round_id = first[-1].round.round_id - rng.choice((0, 0, 1))
    for piece in again[:-1]:
        piece.distributions.round_id = again[-1].round.round_id
    return (*first, *again, PREFIX)


def bad_round_ids(s: GoodVerifySession, rng: Random) -> Refused:
    """Tokens of a round beyond the vocabulary."""
    m = s.round()[-1]
    field = rng.choice((m.round.append_token_ids, m.round.draft_token_ids))
    field.append(rng.choice((s.facts.vocab_size, (1 << 32) - 1)))
    return (m, INVALID)


def too_many_drafts(s: GoodVerifySession, rng: Random) -> Refused:
    """More drafts than a round may hold."""
    m = s.round()[-1]
    size = rng.choice((s.facts.max_drafts + 1, 10_000, 300_000))
    m.round.draft_token_ids[:] = [5] * size
    return (m, INVALID)


def append_too_much(s: GoodVerifySession, rng: Random) -> Refused:
    """More appended than the context holds."""
    m = s.round()[-1]
    size = s.facts.context_length + (1 if rng.random() < 0.9 else 1_000_000)
    m.round.append_token_ids[:] = [5] * size
    return (m, INVALID)


def plain_too_much(s: GoodVerifySession, rng: Random) -> Refused:
    """Too much plain decoding at once."""
    m = s.round()[-1]
    m.round.max_plain_tokens = rng.choice((s.facts.max_plain + 1, (1 << 32) - 1))
    return (m, INVALID)


def bad_budget(s: GoodVerifySession, rng: Random) -> Refused:
    """A budget below nothing, or NaN."""
    m = s.round()
    m[-1].round.remaining_loose_cost_nats = rng.choice((-1.0, -1e-9, -math.inf, math.nan))
    return (*m, INVALID)


def bad_window(s: GoodVerifySession, rng: Random) -> Refused:
    """An open window that cannot be one."""
    m = s.round(min_drafts=1)
    w = m[-1].round.open_window
    w.position, w.target_token_id, w.remaining_matches, w.gap_nats = s.prompt_length, 5, 1, 0.5
    match rng.randrange(5):
        case 0:
            w.position = rng.choice((s.prompt_length - 1, len(s.known), (1 << 32) - 1))
        case 1:
            w.target_token_id = s.facts.vocab_size
        case 2:
            w.remaining_matches = rng.choice((0, 1025, (1 << 32) - 1))
        case 3:
            w.gap_nats = rng.choice((math.nan, -0.1, -math.inf))
        case _:
            w.target_logprobs.top_token_ids.extend([5] * 21)
    return (*m, INVALID)


def bad_distributions(s: GoodVerifySession, rng: Random) -> Refused:
    """Distributions that are none."""
    m = s.round(min_drafts=1)
    pieces = s.distributions(m[-1].round)
    q = rng.choice(rng.choice(pieces).distributions.distributions)
    vocab = s.facts.vocab_size
    match rng.randrange(6):
        case 0:
            q.token_ids[:] = [1, 2, 3]
            q.log_probs = halves(-1.0, rng.choice((math.nan, math.inf, 0.5, 6e4)), -1.0)
        case 1:
            q.token_ids.clear()
            value = rng.choice((math.nan, math.inf, 1.0))
            q.log_probs = halves(*[-8.0] * (vocab - 1), value)
        case 2:
            q.token_ids[:] = [1, 2]
            q.log_probs = halves(-1.0, -1.0) + b"\0" * rng.choice((1, 2, 100))
        case 3:
            q.token_ids[:] = [1, rng.choice((1, vocab, (1 << 32) - 1))]
            q.log_probs = halves(-1.0, -1.0)
        case 4:
            q.token_ids[:] = [5] * (vocab + 1)
            q.log_probs = b""
        case _:
            q.token_ids.clear()
            q.log_probs = b"\x80" * rng.choice((1, 2 * vocab - 2, 2 * vocab + 2, 1 << 21))
    return (*pieces, m[-1], INVALID)


def other_distributions(s: GoodVerifySession, rng: Random) -> Refused:
    """Distributions of another round, another place, or another number."""
    m = s.round(min_drafts=2)
    pieces = s.distributions(m[-1].round)
    match rng.randrange(4):
        case 0:
            pieces[-1].distributions.round_id += rng.choice((1, 1000))
        case 1:
            pieces[0].distributions.first_position += rng.choice((1, 1000))
        case 2:
            pieces.append(pieces[0])
        case _:
            del pieces[0].distributions.distributions[0]
    return (*pieces, m[-1], INVALID)


def late_distributions(s: GoodVerifySession, rng: Random) -> Refused:
    """Distributions after their round, and then another round."""
    m = s.round(min_drafts=1)
    pieces = s.distributions(m[-1].round)
    return (*m, *pieces, s.round()[-1], INVALID)


def endless_distributions(s: GoodVerifySession, rng: Random) -> Refused:
    """More distributions than any round can have."""
    m = verify_pb2.VerifyRequest()
    empty = [common_pb2.TokenDistribution()]
    m.distributions.distributions.extend(empty * rng.choice((0, s.facts.max_drafts + 1, 5000)))
    return (m, INVALID)


BAD_OPENS = [
    round_first, nothing_set, no_tokens, bad_open_ids, too_long, bad_prompt_length, bad_logprobs,
    bad_rule, bad_sampling,
]  # fmt: skip
BAD_ROUNDS = [
    nothing_set, open_twice, keep_too_much, wrong_hash, late_round, bad_round_ids,
    too_many_drafts, append_too_much, plain_too_much, bad_budget, bad_window, bad_distributions,
    other_distributions, late_distributions, endless_distributions,
]  # fmt: skip
