"""A session of the draft service as a good client has it."""

from __future__ import annotations

from random import Random

from bench.fuzz.facts import READ, Facts, send
from bench.fuzz.script import Action
from flyspec.v1 import draft_pb2

NOT_FOUND = frozenset({"NOT_FOUND"})


class GoodDraftSession:
    """Right messages of one session, and what the client knows of it without listening."""

    def __init__(self, facts: Facts, rng: Random) -> None:
        self.facts, self.rng = facts, rng
        text = rng.choice(facts.texts)
        self.known = list(text[: rng.randint(2, min(len(text), 24))])
        self.round_id = rng.choice((0, 1, 1000, 1 << 63))
        self.due = 0

    def open(self) -> draft_pb2.DraftRequest:
        """The opening."""
        rng = self.rng
        message = draft_pb2.DraftRequest()
        o = message.open
        o.token_ids.extend(self.known)
        o.drafter = rng.choice(("", *self.facts.drafters))
        o.prompt_length = rng.choice((0, 1, len(self.known)))
        if rng.random() < 0.4:
            o.sampling.temperature = rng.choice((0.0, 0.5, 1.0, 100.0))
            o.sampling.top_k = rng.choice((0, 1, 5, (1 << 31) - 1))
        if rng.random() < 0.1:
            o.sampling.repetition_penalty = 1.2
            o.sampling.frequency_penalty = -1.0
            o.sampling.logit_bias[rng.randrange(self.facts.vocab_size)] = 3.0
            o.sampling.min_tokens = rng.choice((1, 10, (1 << 32) - 1))
        o.seed = rng.choice((0, 1, (1 << 64) - 1))
        if rng.random() < 0.2:
            o.distribution.top_k = rng.choice((0, 1, 50, 1024))
            o.distribution.draw_from_it = rng.random() < 0.5
        return message

    def advance(self) -> draft_pb2.DraftRequest:
        """A proposal asked for, from what the last one began with or from less."""
        rng = self.rng
        keep = len(self.known) if rng.random() < 0.7 else rng.randint(1, len(self.known))
        append = [rng.randrange(3, self.facts.vocab_size) for _ in range(rng.choice((0, 0, 1, 3)))]
        self.known = [*self.known[:keep], *append]
        self.round_id += rng.choice((1, 1, 1, 2, 1000))
        message = draft_pb2.DraftRequest()
        a = message.advance
        a.round_id, a.keep_length = self.round_id, keep
        a.append_token_ids.extend(append)
        a.max_tokens = rng.choice((0, 1, 2, 4, 8))
        self.due += 1
        return message

    def steps(self, rounds: int, paced: bool) -> list[Action]:
        """The opening and so many rounds; `paced` waits for each answer's first chunk."""
        steps = [send(self.open())]
        for _ in range(rounds):
            steps.append(send(self.advance()))
            if paced:
                steps.append(READ)
        return steps
