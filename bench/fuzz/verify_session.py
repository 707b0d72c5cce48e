"""A session of the verify service as a good client has it."""

from __future__ import annotations

import math
from random import Random

from bench.fuzz.facts import READ, Facts, send
from bench.fuzz.script import Action
from bench.fuzz.values import halves
from flyspec.prefix import TokenSequence
from flyspec.v1 import common_pb2, verify_pb2
from flyspec.validation import RULE_PRESETS


class GoodVerifySession:
    """Right messages of one session, and what the client knows of it without listening."""

    def __init__(self, facts: Facts, rng: Random) -> None:
        self.facts, self.rng = facts, rng
        text = rng.choice(facts.texts)
        self.known = list(text[: rng.randint(4, min(len(text), 24))])
        self.text = text
        self.prompt_length = rng.randint(1, len(self.known))
        self.rule = rng.choice(list(RULE_PRESETS))
        self.round_id = rng.choice((0, 1, 1000, (1 << 63)))
        self.due = 0

    def open(self) -> verify_pb2.VerifyRequest:
        """The opening."""
        rng = self.rng
        message = verify_pb2.VerifyRequest()
        o = message.open
        o.token_ids.extend(self.known)
        o.prompt_length = self.prompt_length
        o.rule.name = self.rule
        if rng.random() < 0.4:
            o.sampling.temperature = rng.choice((0.0, 0.5, 1.0, 100.0))
            o.sampling.top_p = rng.choice((1.0, 0.9, 1e-6))
        if rng.random() < 0.1:
            o.sampling.repetition_penalty = 1.2
            o.sampling.presence_penalty = -1.0
            o.sampling.logit_bias[rng.randrange(self.facts.vocab_size)] = 3.0
            o.sampling.min_tokens = rng.choice((1, 10, (1 << 32) - 1))
        o.seed = rng.choice((0, 1, (1 << 64) - 1))
        if rng.random() < 0.2:
            o.logprobs = rng.choice((0, 1, 20))
        return message

    @property
    def needs_drafts(self) -> bool:
        """Whether the rule refuses drafts without distributions."""
        return self.rule in ("fuzzy", "fuzzy-reference", "rejection")

    def round(self, min_drafts: int = 0) -> list[verify_pb2.VerifyRequest]:
        """A round that follows, its distributions before it."""
        rng = self.rng
        # Whatever the verdict was, these are held: the tokens that the last round began with.
        keep = len(self.known) if rng.random() < 0.7 else rng.randint(1, len(self.known))
        append = [self._token() for _ in range(rng.choice((0, 0, 1, 3)))]
        self.known = [*self.known[:keep], *append]
        self.round_id += rng.choice((1, 1, 1, 2, 1000))
        message = verify_pb2.VerifyRequest()
        r = message.round
        r.round_id, r.keep_length = self.round_id, keep
        r.append_token_ids.extend(append)
        if rng.random() < 0.5:
            r.prefix_hash = TokenSequence(self.known).hash
        count = max(min_drafts, rng.choice((0, 0, 1, 3, 5, 8)))
        at = len(self.known)
        follows = list(self.text[at : at + count])
        r.draft_token_ids.extend([*follows, *(self._token() for _ in range(count - len(follows)))])
        if not count:
            r.max_plain_tokens = rng.choice((0, 1, 2, 5))
        if rng.random() < 0.3:
            r.remaining_loose_tokens = rng.choice((0, 1, 100))
            r.remaining_loose_cost_nats = rng.choice((0.0, 1.5, math.inf))
        self.due += 1
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

    def _token(self) -> int:
        return self.rng.randrange(3, self.facts.vocab_size)

    def steps(self, rounds: int, paced: bool) -> list[Action]:
        """The opening and so many rounds; `paced` waits for each answer."""
        steps = [send(self.open())]
        for _ in range(rounds):
            messages = self.round()
            steps += [send(message) for message in messages]
            if paced:
                steps.append(READ)
        return steps
