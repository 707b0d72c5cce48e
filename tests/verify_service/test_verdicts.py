"""Sessions judged together on a device are told what each is told alone on a CPU."""

import math
from operator import attrgetter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flyspec.engine.distributions import decode, encode
from flyspec.engine.logits import process_logits
from flyspec.engine.model import Rows
from flyspec.prefix import TokenSequence
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.admin import ModelInfo
from flyspec.values.rounds import Budget, OpenWindow, Verdict, VerifyRound
from flyspec.values.tokens import SamplingParams, TokenDistribution, TokenLogprobs
from tests.autojudges import random_judge
from tests.examples import examples
from verify_service.rules import batch_pass, judge
from verify_service.sessions import TargetSession
from verify_service.slot_queue import SessionPlace
from verify_service.verdicts import RoundContext, RoundJudge

VOCABULARY = 16
PLACE = SessionPlace("", 0, has_run=True)
INFO = ModelInfo("m", "", VOCABULARY, 200)
HIDDEN = 5
JUDGE = RoundJudge([15], [14, 15], random_judge(HIDDEN))
RULES = [
    Rule("exact"),
    Rule("fly", 1, 0.1),
    Rule("fly-paper", 1),
    Rule("fly-reference", 1),
    Rule("margin", margin_threshold=2.0, fly_window_size=2),
    Rule("fuzzy", divergence_threshold=0.5),
    Rule("fuzzy-reference", divergence_threshold=2.0),
    Rule("rejection"),
    Rule("typical"),
    Rule("random", random_acceptance=0.7),
    Rule("autojudge", judge_threshold=0.7),
    Rule("autojudge", judge_threshold=0.4),
    Rule("autojudge"),
]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.7, top_p=0.9, top_k=6),
    SamplingParams(1.3, min_p=0.05),
    SamplingParams(repetition_penalty=1.2, min_tokens=9),
    SamplingParams(0.9, presence_penalty=0.5, logit_bias=((3, 1.5),)),
]


@st.composite
def sessions(draw):
    """A session, its number of drafts, and what is unusual about its round."""
    length = draw(st.integers(2, 6))
    logprobs = draw(st.sampled_from([None, None, 0, 3, 20]))
    session = TargetSession(
        TokenSequence(list(range(1, length + 1))), 1, [draw(st.sampled_from(RULES))],
        draw(st.sampled_from(SAMPLINGS)), draw(st.integers(0, 2**64 - 1)), INFO, PLACE, logprobs,
    )  # fmt: skip
    drafts = draw(st.integers(0, 6))
    options = {}
    if drafts and logprobs is not None and draw(st.integers(0, 4)) == 0:
        options["teacher_forced"] = True
    if session.rules[0].name == "margin" and draw(st.booleans()):
        given = None if logprobs is None else TokenLogprobs(-0.5)
        options["open_window"] = OpenWindow(length - 1, 3, 2, 0.1, given)
    if draw(st.integers(0, 3)) == 0:
        options["budget"] = Budget(1, 2.0)
    if draw(st.integers(0, 5)) == 0:
        options["exact_until_position"] = length + 2
    if drafts:
        options["num_top_tokens"] = draw(st.sampled_from([0, 0, 3, 16]))
    return session, drafts, options


def with_round(session, rows, options, number):
    """Drafts of which most are the target's, and distributions if the rule needs them."""
    generator = torch.Generator().manual_seed(number)
    count = len(rows) - 1
    drafts = rows[:-1].argmax(dim=-1)
    others = torch.randint(VOCABULARY, (count,), generator=generator)
    drafts = torch.where(torch.rand(count, generator=generator) < 0.7, drafts, others)
    round_ = VerifyRound(1, len(session.sequence), [], drafts.tolist(), **options)
    spec = distribution_spec(resolve_rule(session.rules[0]), session.sampling)
    sent = []
    if spec is not None and count:
        noise = torch.randn(rows[:-1].shape, generator=generator)
        simple = SamplingParams(session.sampling.temperature)
        sent = encode(process_logits(rows[:-1].float() + 0.3 * noise, simple), spec)
        for index in range(count):
            if number % 5 == index:
                sent[index] = TokenDistribution()
        if number % 11 == 0:
            sent[0] = TokenDistribution(b"\x00\xfc" * VOCABULARY)  # -inf
    return RoundContext(session, round_, sent)


def near(one, other):
    """Equal, but for the last bits of numbers and the details of errors."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-5)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(map(near, one, other))
    if isinstance(one, Exception):
        return type(one) is type(other) and str(one) == str(other)
    if isinstance(one, Verdict) and isinstance(other, Verdict):
        parts = attrgetter(
            "keep_length", "next_token_id", "decisions", "open_window", "logprobs", "top_token_ids"
        )
        return near(parts(one), parts(other))
    return one == other


@given(
    st.lists(sessions(), min_size=1, max_size=8),
    st.integers(0, 2**32),
    st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    st.integers(0, 9),
)
@settings(max_examples=examples(30))
def test_together_as_alone(drawn, number, dtype, bad):
    widths = [drafts + 1 for _, drafts, _ in drawn]
    generator = torch.Generator().manual_seed(number)
    packed = (2 * torch.randn(sum(widths), VOCABULARY, generator=generator)).to(dtype)
    parts = packed.split(widths)
    hidden = torch.randn(sum(widths), HIDDEN, generator=generator).to(dtype).split(widths)
    rounds = [
        (
            context := with_round(session, rows, options, number + i),
            Rows(rows, (hidden[i],) if context.hidden_layers else ()),
        )
        for i, ((session, _, options), rows) in enumerate(zip(drawn, parts, strict=True))
    ]
    if not bad:
        packed[number % len(packed), 5] = math.nan
    before = packed.clone()
    together = JUDGE.judge_all(rounds, at_once=True)
    assert torch.equal(packed.nan_to_num(), before.nan_to_num())
    for round_, found in zip(rounds, together, strict=True):
        (alone,) = JUDGE.judge_all([round_])
        assert near(found, alone), (round_, found, alone)


@pytest.mark.parametrize("rule", RULES[:-3], ids=lambda rule: rule.name)
def test_a_round_on_a_device_is_read_once(rule, monkeypatch):
    """On `meta`, of which any other read is an error."""

    class ReadError(Exception):
        pass

    def read(tables):
        raise ReadError

    monkeypatch.setattr(batch_pass, "read", read)
    rows = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(2))
    for sampling in SAMPLINGS:
        session = TargetSession(TokenSequence([1, 2]), 1, [rule], sampling, 7, INFO, PLACE, 3)
        context = with_round(session, rows, {"num_top_tokens": 3}, 7)
        with pytest.raises(ReadError):
            JUDGE.judge_all([(context, Rows(rows.to("meta")))], at_once=True)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_top_tokens_are_those_of_every_verified_row(at_once, logprobs):
    rows = torch.randn(5, VOCABULARY, generator=torch.Generator().manual_seed(2))
    session = TargetSession(
        TokenSequence([1, 2]), 2, [Rule("exact")], SAMPLINGS[3], 0, INFO, PLACE, logprobs
    )
    for drafts, num_rows in (([3, 4, 5, 6], 5), ([3, 15, 5, 6], 3), ([3, 4], 3)):
        round_ = VerifyRound(1, 2, [], drafts, num_top_tokens=4)
        judged = [(RoundContext(session, round_), Rows(rows[: len(drafts) + 1]))]
        (verdict,) = JUDGE.judge_all(judged, at_once)
        assert isinstance(verdict, Verdict)
        expected = [row.sort(descending=True).indices[:4].tolist() for row in rows[:num_rows]]
        assert list(verdict.top_token_ids) == [token for row in expected for token in row]
    (plain,) = JUDGE.judge_all(
        [(RoundContext(session, VerifyRound(1, 2, [], [], num_top_tokens=4)), Rows(rows[:1]))]
    )
    assert isinstance(plain, Verdict)
    assert plain.top_token_ids == ()


@pytest.mark.parametrize(
    "rule",
    [Rule("fly"), Rule("margin"), *(rule for rule in RULES if rule.name != "autojudge")],
    ids=lambda rule: rule.name,
)
def test_a_session_judges_by_its_rule_with_defaults(rule):
    sampling = SamplingParams(1.0 if rule.name == "rejection" else 0.0)
    session = TargetSession(TokenSequence([1, 2]), 2, [rule], sampling, 7, INFO, PLACE)
    spec = session.distribution
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        rows = 2 * torch.randn(9, VOCABULARY, generator=generator)
        drafts = rows[:-1].argmax(dim=-1).tolist()
        drafts[number % 8] = number % VOCABULARY
        sent = encode(rows[:-1] + 0.5, spec) if spec else []
        (found,) = JUDGE.judge_all(
            [(RoundContext(session, VerifyRound(1, 2, [], drafts), sent), Rows(rows))]
        )
        exactly = spec is not None and spec.draw_from_it
        assert found == judge(
            rule, drafts, rows, sampling=sampling, seed=7, start_position=2,
            eos_token_ids=[15], control_token_ids=[14, 15],
            draft_distributions=decode(sent, drafts, VOCABULARY, renormalise=exactly)
            if spec else None,
        )  # fmt: skip
