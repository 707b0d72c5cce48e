"""Sessions of both services: what good ones share, what must be refused, calls made of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any, ClassVar, NamedTuple

from google.protobuf.message import Message

from bench.fuzz.facts import (
    CANCEL,
    LEAVE,
    PAUSE,
    READ,
    Facts,
    UnaryMethod,
    one_of,
    send,
    spoil_one,
    unary_junk,
)
from bench.fuzz.script import BLAMELESS, FINE, INVALID, PREFIX, Action, Script
from bench.fuzz.values import spoil_bias, spoil_sampling


class GoodSession(ABC):
    """Right messages of one session, and what the client knows of it without listening."""

    request: ClassVar[type[Any]]
    round_field: ClassVar[str]
    least_known: ClassVar[int]
    model: ClassVar[str] = ""
    """The drafter, where there are several, that is a model and so knows its vocabulary."""

    def __init__(self, facts: Facts, rng: Random) -> None:
        self.facts, self.rng = facts, rng
        self.text = rng.choice(facts.texts)
        self.known = list(self.text[: rng.randint(self.least_known, min(len(self.text), 24))])
        self.round_id = rng.choice((0, 1, 1000, 1 << 63))
        self.due = 0

    def open(self, of_model: bool = False) -> Any:
        """The opening; `of_model` lets no drafter take it that knows no vocabulary."""
        rng, message = self.rng, self.request()
        o = message.open
        o.token_ids.extend(self.known)
        if rng.random() < 0.4:
            o.sampling.temperature = rng.choice((0.0, 0.5, 1.0, 100.0))
        if rng.random() < 0.1:
            o.sampling.repetition_penalty = 1.2
            o.sampling.presence_penalty = o.sampling.frequency_penalty = -1.0
            o.sampling.logit_bias[rng.randrange(self.facts.vocab_size)] = 3.0
            o.sampling.min_tokens = rng.choice((1, 10, (1 << 32) - 1))
        o.seed = rng.choice((0, 1, (1 << 64) - 1))
        self.fill(o)
        if of_model and self.model:
            o.drafter = self.model
        return message

    @abstractmethod
    def fill(self, opening: Any) -> None:
        """Add what only this service's openings have."""

    @abstractmethod
    def round(self) -> list[Any]:
        """A round that follows: its message, and before it what belongs to it."""

    def begin(self) -> Any:
        """A round's message from what the last one began with or from less.

        Whatever came of the last round, that is held.
        """
        rng, message = self.rng, self.request()
        r = getattr(message, self.round_field)
        keep = len(self.known) if rng.random() < 0.7 else rng.randint(1, len(self.known))
        append = [self.token() for _ in range(rng.choice((0, 0, 1, 3)))]
        self.known = [*self.known[:keep], *append]
        self.round_id += rng.choice((1, 1, 1, 2, 1000))
        r.round_id, r.keep_length = self.round_id, keep
        r.append_token_ids.extend(append)
        self.due += 1
        return message

    def token(self) -> int:
        """A random one."""
        return self.rng.randrange(3, self.facts.vocab_size)

    def steps(self, rounds: int, paced: bool) -> list[Action]:
        """The opening and so many rounds; `paced` waits for each answer's first message."""
        steps = [send(self.open())]
        for _ in range(rounds):
            steps += [*map(send, self.round()), *[READ] * paced]
        return steps


# --- what a session must be refused for -----------------------------------------------------------


class Mistake(NamedTuple):
    """A mistake's name, its messages, and the statuses that it must get."""

    kind: str
    make: Callable[[Any], Sequence[Any]]
    expects: frozenset[str] = INVALID


def bad_open(
    kind: str,
    expects: frozenset[str] = INVALID,
    *,
    of_model: bool = False,
    **fields: Callable[[Any], Any],
) -> Mistake:
    """An opening with these fields changed; `of_model`: only a model finds it wrong."""

    def make(s: GoodSession) -> list[Any]:
        message = s.open(of_model)
        _change(message.open, s, fields)
        return [message]

    return Mistake(kind, make, expects)


def bad_round(
    kind: str, expects: frozenset[str] = INVALID, **fields: Callable[[Any], Any]
) -> Mistake:
    """A round's message with these fields changed, alone."""

    def make(s: GoodSession) -> list[Any]:
        message = s.round()[-1]
        _change(getattr(message, s.round_field), s, fields)
        return [message]

    return Mistake(kind, make, expects)


def _change(message: Any, s: GoodSession, fields: dict[str, Callable[[Any], Any]]) -> None:
    for name, value_of in fields.items():
        value = value_of(s)
        if isinstance(value, list):
            getattr(message, name)[:] = value
        elif isinstance(value, Message):
            getattr(message, name).CopyFrom(value)
        else:
            setattr(message, name, value)


def _too_long(s: GoodSession) -> list[int]:
    extra = 1 if s.rng.random() < 0.9 else s.rng.choice((10_000, 2_000_000))
    return [5] * (s.facts.context_length + extra)


def _bad_sampling(s: GoodSession) -> list[Any]:
    message = s.open()
    spoil_sampling(message.open.sampling, s.rng)
    return [message]


def _bad_bias(s: GoodSession) -> list[Any]:
    message = s.open(of_model=True)
    spoil_bias(message.open.sampling.logit_bias, s.facts.vocab_size, s.rng)
    return [message]


def _late_round(s: GoodSession) -> list[Any]:
    first, again = s.round(), s.round()
    round_id = getattr(first[-1], s.round_field).round_id - s.rng.choice((0, 0, 1))
    for message in again:
        ((_, part),) = message.ListFields()
        part.round_id = round_id
    return [*first, *again]


_NOTHING = Mistake("A message with nothing in it", lambda s: [s.request()])
BAD_OPENS = [
    Mistake("A round before the opening", lambda s: s.round()[-1:]),
    _NOTHING,
    bad_open("An empty sequence", token_ids=lambda s: [], prompt_length=lambda s: 0),
    bad_open("Ids beyond the vocabulary", of_model=True, token_ids=lambda s: [
        *s.known, s.rng.choice((s.facts.vocab_size, 1 << 31, (1 << 32) - 1))]),
    bad_open("A sequence beyond the context", of_model=True, token_ids=_too_long),
    Mistake("Sampling parameters out of range", _bad_sampling),
    Mistake("Biases out of range, of tokens that do not exist, or too many", _bad_bias),
]  # fmt: skip
BAD_ROUNDS = [
    _NOTHING,
    Mistake("A second opening", lambda s: [s.open()]),
    Mistake("A round that came before", _late_round, PREFIX),
]


# --- calls ----------------------------------------------------------------------------------------


class SessionSource:
    """Sessions of a service's streaming method, its other methods, and what every server has."""

    method: ClassVar[str]
    session: ClassVar[type[GoodSession]]
    bad_opens: ClassVar[Sequence[Mistake]]
    bad_rounds: ClassVar[Sequence[Mistake]]
    unary: ClassVar[Sequence[UnaryMethod]]
    others: ClassVar[Sequence[tuple[float, Callable[[Random], Script]]]] = ()
    """Scripts of other methods, with their weights."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def script(self, rng: Random) -> Script:
        """A call: mostly a session with something wrong in it."""
        return one_of(
            rng,
            (
                (20, self._good),
                (40, self._one_bad),
                (25, self._spoiled),
                (5, self._out_of_order),
                (1, self._edge),
                (4, self._abandoned),
                (6, partial(unary_junk, methods=self.unary)),
                *self.others,
            ),
        )

    def _good(self, rng: Random) -> Script:
        session = self.session(self._facts, rng)
        steps = session.steps(rng.randint(0, 6), paced=rng.random() < 0.8)
        return Script(self.method, tuple(steps), "a good session", FINE, session.due)

    def _one_bad(self, rng: Random) -> Script:
        """Good messages, then one that must be refused, then more."""
        session = self.session(self._facts, rng)
        opens = rng.random() < 0.35
        before = [] if opens else session.steps(rng.randint(0, 3), paced=rng.random() < 0.7)
        mistake = rng.choice(self.bad_opens if opens else self.bad_rounds)
        steps = [*before, *map(send, mistake.make(session))]
        if rng.random() < 0.5:
            steps += [PAUSE, send(session.round()[-1], "after it")]
        return Script(self.method, tuple(steps), mistake.kind, mistake.expects)

    def _spoiled(self, rng: Random) -> Script:
        session = self.session(self._facts, rng)
        steps = session.steps(rng.randint(1, 4), paced=rng.random() < 0.5)
        for _ in range(rng.choice((1, 1, 2))):
            steps = spoil_one(steps, session.request, rng)
        return Script(self.method, tuple(steps), "a message spoiled")

    def _out_of_order(self, rng: Random) -> Script:
        steps = self.session(self._facts, rng).steps(rng.randint(2, 5), paced=False)
        rng.shuffle(steps)
        return Script(self.method, tuple(steps), "messages shuffled")

    def _edge(self, rng: Random) -> Script:
        """A sequence that ends just before its context, or grows beyond it."""
        session = self.session(self._facts, rng)
        length = self._facts.context_length - rng.randrange(14)
        session.known = rng.choices(session.text, k=length)
        steps = session.steps(rng.randint(1, 4), paced=rng.random() < 0.5)
        return Script(self.method, tuple(steps), "at the end of the context", BLAMELESS)

    def _abandoned(self, rng: Random) -> Script:
        session = self.session(self._facts, rng)
        steps = session.steps(rng.randint(0, 3), paced=rng.random() < 0.5)
        steps = steps[: rng.randint(0, len(steps))]
        how = rng.random()
        if how < 0.6:
            return Script(self.method, (*steps, CANCEL), "cancelled")
        if how < 0.8:
            return Script(self.method, (*steps, LEAVE), "left open")
        deadline = rng.choice((0.001, 0.01, 0.05))
        return Script(self.method, tuple(steps), "its deadline passes", BLAMELESS, 0, deadline)
