"""A session of the verify service as a good client has it."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from bench.fuzz.facts import Facts
from bench.fuzz.session import GoodSession
from bench.fuzz.values import halves
from flyspec.prefix import TokenSequence
from flyspec.rules.presets import RULE_PRESETS
from flyspec.v1 import common_pb2, verify_pb2


class GoodVerifySession(GoodSession):
    """Rounds to be judged, with the distributions that the rule needs."""

    request = verify_pb2.VerifyRequest
    round_field = "round"
    least_known = 4

    def __init__(self, facts: Facts, rng: Random) -> None:
        super().__init__(facts, rng)
        self.prompt_length = rng.randint(1, len(self.known))
        self.rule = rng.choice(list(RULE_PRESETS))

    def fill(self, opening: verify_pb2.VerifyOpen) -> None:
        """Rule, top-p, log-probabilities."""
        rng = self.rng
        opening.prompt_length = self.prompt_length
        opening.rule.name = self.rule
        if opening.sampling.temperature:
            opening.sampling.top_p = rng.choice((1.0, 0.9, 1e-6))
        if rng.random() < 0.2:
            opening.logprobs = rng.choice((0, 1, 20))

    @property
    def needs_drafts(self) -> bool:
        """Whether the rule refuses drafts without distributions."""
        return self.rule in ("fuzzy", "fuzzy-reference", "rejection")

    def round(self, min_drafts: int = 0) -> list[Any]:
        """A round that follows, its distributions before it."""
        rng, message = self.rng, self.begin()
        r = message.round
        if rng.random() < 0.5:
            r.prefix_hash = TokenSequence(self.known).hash
        count = max(min_drafts, rng.choice((0, 0, 1, 3, 5, 8)))
        at = len(self.known)
        follows = list(self.text[at : at + count])
        r.draft_token_ids.extend([*follows, *(self.token() for _ in range(count - len(follows)))])
        if not count:
            r.max_plain_tokens = rng.choice((0, 1, 2, 5))
        if rng.random() < 0.3:
            r.remaining_loose_tokens = rng.choice((0, 1, 100))
            r.remaining_loose_cost_nats = rng.choice((0.0, 1.5, math.inf))
        if count and self.needs_drafts:
            return [*self.distributions(r), message]
        return [message]

    def distributions(self, r: verify_pb2.VerifyRound) -> list[verify_pb2.VerifyRequest]:
        """The distributions of a round's drafts, in one piece or in two."""
        whole = [self._distribution(token) for token in r.draft_token_ids]
        cut = self.rng.randint(1, len(whole))
        first = r.keep_length + len(r.append_token_ids)
        pieces = []
        for start, part in ((0, whole[:cut]), (cut, whole[cut:])):
            if part:
                message = verify_pb2.VerifyRequest()
                message.distributions.round_id = r.round_id
                message.distributions.first_position = first + start
                message.distributions.distributions.extend(part)
                pieces.append(message)
        return pieces

    def _distribution(self, token: int) -> common_pb2.TokenDistribution:
        if self.rng.random() < 0.3:
            return common_pb2.TokenDistribution()  # a point mass
        if self.rule == "fuzzy-reference":  # takes no lists
            size = self.facts.vocab_size
            return common_pb2.TokenDistribution(log_probs=halves(-8.0) * size)
        others = [t for t in (5, 6, 7) if t != token]
        values = halves(-0.5, *[-2.0] * len(others))
        return common_pb2.TokenDistribution(log_probs=values, token_ids=[token, *others])
