"""Scripts for the draft service."""

from __future__ import annotations

from random import Random
from typing import Any

from bench.fuzz import session
from bench.fuzz.facts import CANCEL, bare, send, spoiled
from bench.fuzz.script import INVALID, NOT_FOUND, PREFIX, Script
from bench.fuzz.session import GoodSession, SessionSource, bad_open, bad_round
from bench.fuzz.system import SYSTEM_METHODS
from bench.fuzz.values import edge, mutate
from flyspec.v1 import draft_pb2

SERVICE = "/flyspec.v1.DraftService/"


class GoodDraftSession(GoodSession):
    """Proposals asked for."""

    request = draft_pb2.DraftRequest
    round_field = "advance"
    least_known = 2
    model = "model"

    def fill(self, opening: draft_pb2.DraftOpen) -> None:
        """Drafter, top-k, which distributions."""
        rng = self.rng
        opening.drafter = rng.choice(("", *self.facts.drafters))
        opening.prompt_length = rng.choice((0, 1, len(self.known)))
        if opening.sampling.temperature:
            opening.sampling.top_k = rng.choice((0, 1, 5, (1 << 31) - 1))
        if rng.random() < 0.2:
            opening.distribution.top_k = rng.choice((0, 1, 50, 1024))
            opening.distribution.draw_from_it = rng.random() < 0.5

    def round(self) -> list[Any]:
        """A proposal asked for."""
        message = self.begin()
        message.advance.max_tokens = self.rng.choice((0, 1, 2, 4, 8))
        return [message]


BAD_OPENS = [
    *session.BAD_OPENS,
    bad_open("A prompt longer than the sequence",
             prompt_length=lambda s: s.rng.choice((len(s.known) + 1, (1 << 32) - 1))),
    bad_open("Too many of the most likely tokens wanted", distribution=lambda s: (
        draft_pb2.DistributionSpec(top_k=s.rng.choice((1025, (1 << 32) - 1))))),
    bad_open("A drafter that does not exist", NOT_FOUND,
             drafter=lambda s: s.rng.choice(("nobody", "\0", "é😀" * 500, "Model"))),
]  # fmt: skip
BAD_ROUNDS = [
    *session.BAD_ROUNDS,
    bad_round("More kept than is held", PREFIX, keep_length=lambda s: s.facts.context_length - 10),
    bad_round("More kept than any session can hold", INVALID | PREFIX,
              keep_length=lambda s: s.rng.choice((1 << 31, (1 << 32) - 1))),
    bad_round("Nothing kept and nothing appended",
              keep_length=lambda s: 0, append_token_ids=lambda s: []),
    bad_round("More tokens wanted than a round may have", max_tokens=lambda s: s.rng.choice(
        (s.facts.max_drafts + 1, 1 << 31, (1 << 32) - 1))),
    bad_round("More appended than any drafter holds", append_token_ids=lambda s: (
        [5] * ((1 << 20) + s.rng.choice((1, 1_000_000))))),
]  # fmt: skip


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
            steps[at] = spoiled(steps[at].data, rng)
        case _:
            steps.append(CANCEL)
    return Script(SERVICE + "AddTokenizer", tuple(steps), "a tokenizer that is none")


class DraftSource(SessionSource):
    """Sessions of `Draft`, and tokenizers."""

    method = SERVICE + "Draft"
    session = GoodDraftSession
    bad_opens = BAD_OPENS
    bad_rounds = BAD_ROUNDS
    unary = (bare(SERVICE + "Describe", draft_pb2.DraftServiceDescribeRequest), *SYSTEM_METHODS)
    others = ((4, _tokenizer),)
