"""Scripts for the draft service."""

from __future__ import annotations

from functools import partial
from random import Random

from bench.fuzz.draft_mistakes import BAD_ADVANCES, BAD_OPENS
from bench.fuzz.draft_session import GoodDraftSession
from bench.fuzz.facts import (
    CANCEL,
    LEAVE,
    PAUSE,
    Facts,
    one_of,
    send,
    spoil_one,
    unary_junk,
)
from bench.fuzz.script import BLAMELESS, FINE, Action, Do, Script
from bench.fuzz.system import SYSTEM_METHODS
from bench.fuzz.values import edge, junk, mangle, mutate
from flyspec.v1 import draft_pb2

METHOD = "/flyspec.v1.DraftService/Draft"
ADD_TOKENIZER = "/flyspec.v1.DraftService/AddTokenizer"
UNARY = [
    (
        "/flyspec.v1.DraftService/Describe",
        draft_pb2.DraftServiceDescribeRequest,
        lambda _: draft_pb2.DraftServiceDescribeRequest(),
    ),
    *SYSTEM_METHODS,
]


class DraftSource:
    """Sessions of `Draft`, tokenizers, the other methods, and what every server has."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts

    def script(self, rng: Random) -> Script:
        """A call: mostly a session with something wrong in it."""
        return one_of(
            rng,
            (
                (20, self._good),
                (40, self._one_bad),
                (22, self._spoiled),
                (5, self._out_of_order),
                (1, self._edge),
                (4, self._abandoned),
                (5, partial(unary_junk, methods=UNARY)),
                (4, _tokenizer),
            ),
        )

    def _good(self, rng: Random) -> Script:
        session = GoodDraftSession(self._facts, rng)
        steps = session.steps(rng.randint(0, 6), paced=rng.random() < 0.8)
        return Script(METHOD, tuple(steps), "a good session", FINE, session.due)

    def _one_bad(self, rng: Random) -> Script:
        session = GoodDraftSession(self._facts, rng)
        bad_open = rng.random() < 0.4
        before = [] if bad_open else session.steps(rng.randint(0, 3), paced=rng.random() < 0.7)
        make = rng.choice(BAD_OPENS if bad_open else BAD_ADVANCES)
        *messages, expects = make(session, rng)
        steps = [*before, *(send(m) for m in messages)]
        if rng.random() < 0.5:
            steps += [PAUSE, send(session.advance(), "after it")]
        kind = make.__doc__ or make.__name__
        return Script(METHOD, tuple(steps), kind.rstrip("."), expects)

    def _spoiled(self, rng: Random) -> Script:
        session = GoodDraftSession(self._facts, rng)
        steps = session.steps(rng.randint(1, 4), paced=rng.random() < 0.5)
        for _ in range(rng.choice((1, 1, 2))):
            steps = spoil_one(steps, _read, rng)
        return Script(METHOD, tuple(steps), "a message spoiled")

    def _out_of_order(self, rng: Random) -> Script:
        steps = GoodDraftSession(self._facts, rng).steps(rng.randint(2, 5), paced=False)
        rng.shuffle(steps)
        return Script(METHOD, tuple(steps), "messages shuffled")

    def _edge(self, rng: Random) -> Script:
        """A sequence that ends just before its context, or grows beyond it."""
        session = GoodDraftSession(self._facts, rng)
        length = self._facts.context_length - rng.randrange(14)
        session.known = [rng.choice(session.known) for _ in range(length)]
        steps = session.steps(rng.randint(1, 4), paced=rng.random() < 0.5)
        return Script(METHOD, tuple(steps), "at the end of the context", BLAMELESS)

    def _abandoned(self, rng: Random) -> Script:
        steps = GoodDraftSession(self._facts, rng).steps(
            rng.randint(0, 3), paced=rng.random() < 0.5
        )
        steps = steps[: rng.randint(0, len(steps))]
        how = rng.random()
        if how < 0.6:
            return Script(METHOD, (*steps, CANCEL), "cancelled")
        if how < 0.8:
            return Script(METHOD, (*steps, LEAVE), "left open")
        deadline = rng.choice((0.001, 0.01, 0.05))
        return Script(METHOD, tuple(steps), "its deadline passes", BLAMELESS, 0, deadline)


def _read(data: bytes) -> draft_pb2.DraftRequest:
    try:
        return draft_pb2.DraftRequest.FromString(data)
    except Exception:
        return draft_pb2.DraftRequest()


def _tokenizer(rng: Random) -> Script:
    """A tokenizer that is none; good ones would stay and are tested elsewhere."""
    facts = draft_pb2.AddTokenizerRequest()
    fields = draft_pb2.TokenizerFacts.DESCRIPTOR.fields_by_name
    facts.facts.fingerprint = edge(fields["fingerprint"], rng)
    facts.facts.vocab_size = edge(fields["vocab_size"], rng)
    facts.facts.eos_token_ids.extend([1] * rng.choice((0, 1, 1000)))
    text = rng.choice(
        (b"", b"{}", b"[" * 10_000, b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
         b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 4294967295}}}')
    )  # fmt: skip
    chunk = draft_pb2.AddTokenizerRequest(tokenizer_json_chunk=text)
    steps = [send(facts), *[send(chunk)] * rng.choice((0, 1, 3))]
    match rng.randrange(5):
        case 0:
            rng.shuffle(steps)
        case 1:
            steps.append(steps[0])
        case 2:
            mutate(facts, rng)
            steps[0] = send(facts)
        case 3:
            at = rng.randrange(len(steps))
            data = mangle(steps[at].data, rng) if rng.random() < 0.5 else junk(rng)
            steps[at] = Action(Do.SEND, data, "bytes")
        case _:
            steps.append(CANCEL)
    return Script(ADD_TOKENIZER, tuple(steps), "a tokenizer that is none")
