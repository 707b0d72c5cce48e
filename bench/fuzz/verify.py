"""Scripts for the verify service: sessions that are right but for one thing, and worse."""

from __future__ import annotations

import math
from typing import Any

from bench.fuzz import session
from bench.fuzz.facts import bare
from bench.fuzz.script import PREFIX
from bench.fuzz.session import Mistake, SessionSource, bad_open, bad_round
from bench.fuzz.system import SYSTEM_METHODS
from bench.fuzz.values import halves, spoil_rule
from bench.fuzz.verify_session import GoodVerifySession
from flyspec.prefix import TokenSequence
from flyspec.v1 import common_pb2, verify_pb2

SERVICE = "/flyspec.v1.VerifyService/"


def _bad_rule(s: GoodVerifySession) -> list[Any]:
    m = s.open()
    spoil_rule(m.open.rule, ("", "Exact"), s.facts.vocab_size, s.rng)
    return [m]


def _wrong_hash(s: GoodVerifySession) -> list[Any]:
    m = s.round()
    m[-1].round.prefix_hash = (TokenSequence(s.known).hash ^ s.rng.choice((1, 1 << 63))) or 1
    return m


def _bad_round_ids(s: GoodVerifySession) -> list[Any]:
    m = s.round()[-1]
    field = s.rng.choice((m.round.append_token_ids, m.round.draft_token_ids))
    field.append(s.rng.choice((s.facts.vocab_size, (1 << 32) - 1)))
    return [m]


def _too_much_appended(s: GoodVerifySession) -> list[int]:
    return [5] * (s.facts.context_length + (1 if s.rng.random() < 0.9 else 1_000_000))


def _bad_window(s: GoodVerifySession) -> list[Any]:
    m = s.round(min_drafts=1)
    w = m[-1].round.open_window
    w.position, w.target_token_id, w.remaining_matches, w.gap_nats = s.prompt_length, 5, 1, 0.5
    match s.rng.randrange(5):
        case 0:
            w.position = s.rng.choice((s.prompt_length - 1, len(s.known), (1 << 32) - 1))
        case 1:
            w.target_token_id = s.facts.vocab_size
        case 2:
            w.remaining_matches = s.rng.choice((0, 1025, (1 << 32) - 1))
        case 3:
            w.gap_nats = s.rng.choice((math.nan, -0.1, -math.inf))
        case _:
            w.target_logprobs.top_token_ids.extend([5] * 21)
    return m


def _bad_distributions(s: GoodVerifySession) -> list[Any]:
    m = s.round(min_drafts=1)
    pieces = s.distributions(m[-1].round)
    q = s.rng.choice(s.rng.choice(pieces).distributions.distributions)
    vocab = s.facts.vocab_size
    match s.rng.randrange(6):
        case 0:
            q.token_ids[:] = [1, 2, 3]
            q.log_probs = halves(-1.0, s.rng.choice((math.nan, math.inf, 0.5, 6e4)), -1.0)
        case 1:
            q.token_ids.clear()
            value = s.rng.choice((math.nan, math.inf, 1.0))
            q.log_probs = halves(*[-8.0] * (vocab - 1), value)
        case 2:
            q.token_ids[:] = [1, 2]
            q.log_probs = halves(-1.0, -1.0) + b"\0" * s.rng.choice((1, 2, 100))
        case 3:
            q.token_ids[:] = [1, s.rng.choice((1, vocab, (1 << 32) - 1))]
            q.log_probs = halves(-1.0, -1.0)
        case 4:
            q.token_ids[:] = [5] * (vocab + 1)
            q.log_probs = b""
        case _:
            q.token_ids.clear()
            q.log_probs = b"\x80" * s.rng.choice((1, 2 * vocab - 2, 2 * vocab + 2, 1 << 21))
    return [*pieces, m[-1]]


def _other_distributions(s: GoodVerifySession) -> list[Any]:
    m = s.round(min_drafts=2)
    pieces = s.distributions(m[-1].round)
    match s.rng.randrange(4):
        case 0:
            pieces[-1].distributions.round_id += s.rng.choice((1, 1000))
        case 1:
            pieces[0].distributions.first_position += s.rng.choice((1, 1000))
        case 2:
            pieces.append(pieces[0])
        case _:
            del pieces[0].distributions.distributions[0]
    return [*pieces, m[-1]]


def _late_distributions(s: GoodVerifySession) -> list[Any]:
    m = s.round(min_drafts=1)
    pieces = s.distributions(m[-1].round)
    return [*m, *pieces, s.round()[-1]]


def _endless_distributions(s: GoodVerifySession) -> list[Any]:
    m = verify_pb2.VerifyRequest()
    empty = [common_pb2.TokenDistribution()]
    m.distributions.distributions.extend(empty * s.rng.choice((0, s.facts.max_drafts + 1, 5000)))
    return [m]


BAD_OPENS = [
    *session.BAD_OPENS,
    bad_open("A prompt longer than the sequence, or none",
             prompt_length=lambda s: s.rng.choice((0, len(s.known) + 1, (1 << 32) - 1))),
    bad_open("Too many log-probabilities wanted",
             logprobs=lambda s: s.rng.choice((21, 1 << 20, (1 << 32) - 1))),
    Mistake("A rule that is none, or has parameters that do not fit", _bad_rule),
]  # fmt: skip
BAD_ROUNDS = [
    *session.BAD_ROUNDS,
    bad_round("More kept than is held", PREFIX, keep_length=lambda s: s.rng.choice(
        (s.facts.context_length * 2, 1 << 31, (1 << 32) - 1))),
    Mistake("Another prefix than is held", _wrong_hash, PREFIX),
    Mistake("Tokens of a round beyond the vocabulary", _bad_round_ids),
    bad_round("More drafts than a round may hold", draft_token_ids=lambda s: [5] * s.rng.choice(
        (s.facts.max_drafts + 1, 10_000, 300_000))),
    bad_round("More appended than the context holds", append_token_ids=_too_much_appended),
    bad_round("Too much plain decoding at once", max_plain_tokens=lambda s: s.rng.choice(
        (s.facts.max_plain + 1, (1 << 32) - 1))),
    bad_round("A budget below nothing, or NaN", remaining_loose_cost_nats=lambda s: s.rng.choice(
        (-1.0, -1e-9, -math.inf, math.nan))),
    Mistake("An open window that cannot be one", _bad_window),
    Mistake("Distributions that are none", _bad_distributions),
    Mistake("Distributions of another round, another place, or another number",
            _other_distributions),
    Mistake("Distributions after their round, and then another round", _late_distributions),
    Mistake("More distributions than any round can have", _endless_distributions),
]  # fmt: skip


class VerifySource(SessionSource):
    """Sessions of `Verify`."""

    method = SERVICE + "Verify"
    session = GoodVerifySession
    bad_opens = BAD_OPENS
    bad_rounds = BAD_ROUNDS
    unary = (
        bare(SERVICE + "Describe", verify_pb2.VerifyServiceDescribeRequest),
        bare(SERVICE + "GetTokenizer", verify_pb2.GetTokenizerRequest),
        *SYSTEM_METHODS,
    )
