"""Requests are validated and completed, field by field."""

from __future__ import annotations

import math
from typing import Any

import pytest

from flyspec import wire
from flyspec.config import OrchestratorSettings
from flyspec.errors import InvalidArgumentError
from flyspec.rule_files import RuleBook
from flyspec.rules import Rule
from flyspec.rules.presets import DEFAULT_RULE, RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.tokenizer import Tokenizer
from flyspec.v1 import common_pb2, generation_pb2
from flyspec.validation import distribution_spec
from flyspec.values.admin import JudgeInfo, ModelInfo, TokenizerBundle, VerifyServiceInfo
from flyspec.values.phases import MAX_RULES, Phase
from flyspec.values.requests import GenerationRequest
from flyspec.values.rounds import Budget, DistributionSpec, SessionStatus
from flyspec.values.tokens import SamplingParams
from orchestrator.generation.plan import (
    DraftPlan,
    GenerationPlan,
    Judging,
    OutputLimits,
    Reporting,
    make_plan,
)
from tests.tiny import make_tokenizer

VOCAB_SIZE, CONTEXT, MAX_DRAFT = 400, 64, 32
PROMPT = [5, 6, 7]
NO_LIMITS = RuleBook()


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    json = make_tokenizer().backend_tokenizer.to_str().encode()
    return Tokenizer(TokenizerBundle(json, "f", (1,), (0, 1, 2), chat_template="{{ messages }}"))


def target(vocab_size: int = VOCAB_SIZE, max_rules: int = MAX_RULES) -> VerifyServiceInfo:
    model = ModelInfo("target", "f", vocab_size, CONTEXT)
    return VerifyServiceInfo(
        model,
        SessionStatus(0, 4),
        64,
        8,
        tuple(RULE_PRESETS),
        max_rules=max_rules,
        judge=JudgeInfo("j", 0.25),
    )


@pytest.fixture
def plan(tokenizer: Tokenizer) -> Any:
    def make(
        request: generation_pb2.GenerateRequest | None = None,
        rules: RuleBook = NO_LIMITS,
        vocab_size: int = VOCAB_SIZE,
        max_rules: int = MAX_RULES,
        settings: dict[str, Any] | None = None,
        **fields: Any,
    ) -> GenerationPlan:
        if request is None:
            request = generation_pb2.GenerateRequest(**fields)
        if request.WhichOneof("prompt") is None:
            request.token_ids.ids.extend(PROMPT)
        return make_plan(
            wire.decode(GenerationRequest, request),
            tokenizer,
            target(vocab_size, max_rules),
            OrchestratorSettings(**settings or {}),
            MAX_DRAFT,
            rules,
        )

    return make


def speculation(**fields: Any) -> generation_pb2.Speculation:
    return generation_pb2.Speculation(**fields)


def test_an_empty_request_gets_every_default(plan: Any) -> None:
    made = plan()
    seeds = {plan().seed for _ in range(4)}
    assert len(seeds) == 4
    rule = resolve_rule(Rule(DEFAULT_RULE), 15)
    assert made == GenerationPlan(
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(),
        seed=made.seed,
        limits=OutputLimits(
            CONTEXT - len(PROMPT), CONTEXT, max_plain_tokens=8, end_token_ids=frozenset({1})
        ),
        judging=Judging(rule, exact_until_position=len(PROMPT), loop_guard=True, judged_k=15),
        drafts=DraftPlan(
            MAX_DRAFT,
            adaptive=True,
            distribution=distribution_spec(rule, SamplingParams()),
            invisible=frozenset({0, 1, 2}),
        ),
    )


def test_every_field_is_taken(plan: Any) -> None:
    made = plan(
        sampling=common_pb2.SamplingParams(
            temperature=0.5, min_p=0.1, logit_bias={399: -1.0, 3: 2.0}, min_tokens=9
        ),
        seed=0,
        max_tokens=9,
        stop=["a", "b"],
        stop_token_ids=[7, 7],
        ignore_eos=True,
        logprobs=0,
        prediction_token_ids=[5, 6],
        speculation=speculation(
            drafter="x",
            rule=common_pb2.Rule(name="margin", margin_threshold=0.1, guarded_token_ids=[399]),
            num_speculative_tokens=4,
            max_loose_tokens=0,
            max_loose_cost_nats=0.0,
            exact_prefix_tokens=2,
            eager=True,
            disable_loop_guard=True,
        ),
    )
    rule = resolve_rule(Rule("margin", margin_threshold=0.1, guarded_token_ids=(399,)), 4)
    assert made == GenerationPlan(
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(
            temperature=0.5, min_p=0.1, logit_bias=((3, 2.0), (399, -1.0)), min_tokens=9
        ),
        seed=0,
        limits=OutputLimits(
            9, CONTEXT, 8, ("a", "b"), frozenset({7}), frozenset({1, 7}), ignore_eos=True
        ),
        judging=Judging(
            rule, allowed=Budget(0, 0.0), exact_until_position=len(PROMPT) + 2, loop_guard=False
        ),
        drafts=DraftPlan(4, drafter="x", prediction=[5, 6], invisible=frozenset({0, 1, 2})),
        reporting=Reporting(eager=True, logprobs=0),
    )


PHASES = [
    {"until": ["####"], "max_loose_tokens": 3},
    {"rule": {"name": "margin"}, "until_token_ids": [9]},
    {"rule": {"name": "exact"}},
]


def test_phases_are_resolved_like_the_rule(plan: Any) -> None:
    """W follows from the requested K in every phase; a phase without a rule has the request's."""
    made = plan(
        speculation=speculation(
            rule={"name": "fly"}, phases=PHASES, exact_inside=["json", "tool_call", "json"],
            num_speculative_tokens=4, max_loose_tokens=5,
        )
    )  # fmt: skip
    fly, margin = (resolve_rule(Rule(name), 4) for name in ("fly", "margin"))
    assert fly.fly_window_size == 3
    assert made.judging.phases == (
        Phase(fly, ("####",), max_loose_tokens=3),
        Phase(margin, (), (9,)),
        Phase(Rule("exact")),
    )
    assert made.judging.rule == fly
    assert made.judging.rules == (fly, margin, Rule("exact"), Rule("exact"))
    assert made.judging.exact_inside == ("tool_call", "json")
    assert (made.judging.main_rule.name, made.judging.names) == ("fly", "fly, margin, exact")
    found = made.judging
    assert (found.lossless, found.token_exact, found.loop_guard, found.has_budget) == (
        False, False, True, True,
    )  # fmt: skip
    assert any(w.startswith("rule.fly_window_size is 3") for w in made.warnings) is False
    assert any("phases[0].rule.fly_window_size is 3" in w for w in made.warnings)


def test_what_is_exact_in_all_phases_is_exact(plan: Any) -> None:
    made = plan(speculation=speculation(phases=[{"until": ["a"]}, {}], rule={"name": "exact"}))
    found = made.judging
    assert (found.lossless, found.token_exact, found.loop_guard, found.judged_k) == (
        True, True, False, 0,
    )  # fmt: skip
    assert made.judging.main_rule.name == "exact"
    later = [{"until": ["a"]}, {"rule": {"name": "fly"}}]
    made = plan(speculation=speculation(phases=later, rule={"name": "exact"}))
    assert (made.judging.main_rule.name, made.judging.loop_guard, made.judging.judged_k) == (
        "fly",
        True,
        15,
    )


def test_exact_inside_alone_makes_one_phase(plan: Any) -> None:
    made = plan(speculation=speculation(exact_inside=["json"]))
    assert made.judging.phases == (Phase(made.judging.rule),)
    assert made.judging.rules == (made.judging.rule, Rule("exact"))


def test_rules_of_phases_may_need_draft_distributions(plan: Any) -> None:
    phases = [{"rule": {"name": "fuzzy"}, "until": ["a"]}, {"rule": {"name": "exact"}}]
    assert plan(speculation=speculation(phases=phases)).drafts.distribution == DistributionSpec(50)
    undrafted = {"rule": {"name": "fuzzy"}, "num_speculative_tokens": 0}
    assert plan(speculation=undrafted).drafts.distribution is None


def test_an_older_verify_service_has_one_rule(plan: Any) -> None:
    for max_rules, count in ((0, 2), (2, 3)):
        phases = [*([{"until": ["a"]}] * (count - 1)), {}]
        with pytest.raises(
            InvalidArgumentError, match=f"need {count} rules, but the verify service can use "
        ):
            plan(speculation=speculation(phases=phases), max_rules=max_rules)
    assert plan(speculation=speculation(phases=[{}]), max_rules=0).judging.phases


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([{}] * 17, "speculation.phases: at most 16"),
        ([{}, {}], "speculation.phases[0].until: give a text"),
        ([{"until": ["a"]}], "speculation.phases[0].until: the last phase has no"),
        ([{"until": [""]}, {}], "phases[0].until: each string must have 1 to 1024"),
        ([{"until": ["a"] * 17}, {}], "phases[0].until: at most 16 strings allowed, got 17"),
        ([{"until_token_ids": [10**6]}, {}], "phases[0].until_token_ids: token id 1000000 is out"),
        ([{"until": ["a"]}, {"rule": {"name": "fyl"}}], "did you mean fly"),
        (
            [{"until": ["a"]}, {"rule": {"name": "fly", "margin_threshold": 1.0}}],
            "speculation.phases[1].rule.margin_threshold does not apply",
        ),
        ([{"max_loose_cost_nats": -1.0}], "phases[0].max_loose_cost_nats must be finite and at"),
        (
            [{"rule": {"name": "fuzzy"}, "until": ["a"]},
             {"rule": {"name": "kl", "divergence_top_k": 3}}],
            "the rules 'fuzzy' and 'kl' need different draft distributions",
        ),
        (
            [{"rule": {"name": "rejection"}, "until": ["a"]}, {"rule": {"name": "cactus"}}],
            "the rules 'rejection' and 'cactus' need different draft distributions",
        ),
    ],
)  # fmt: skip
def test_phases_that_make_no_sense_are_refused(plan: Any, phases: Any, message: str) -> None:
    warm = common_pb2.SamplingParams(temperature=1.0)
    with pytest.raises(InvalidArgumentError) as caught:
        plan(sampling=warm, speculation=speculation(rule={"name": "exact"}, phases=phases))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("limits", "phase", "message"),
    [
        ({"max_margin_threshold": 0.1}, {"rule": {"name": "margin"}},
         r"phases\[1\].rule.margin_threshold must be at most 0.1 on this server"),
        ({"allowed_rules": ["fly", "exact"]}, {"rule": {"name": "margin"}},
         r"phases\[1\].rule.name must be one of exact, fly on this server"),
        ({"max_loose_tokens": 4}, {"max_loose_tokens": 5},
         r"speculation.phases\[1\].max_loose_tokens must be between 0 and 4 on this server"),
    ],
)  # fmt: skip
def test_limits_hold_in_every_phase(plan: Any, limits: Any, phase: Any, message: str) -> None:
    rules = RuleBook.model_validate({"limits": limits})
    asked = speculation(phases=[{"until": ["a"]}, phase], rule={"name": "fly"})
    with pytest.raises(InvalidArgumentError, match=message):
        plan(speculation=asked, rules=rules)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"logprobs": 21}, "logprobs must be an integer between 0 and 20, got 21"),
        (
            {"max_tokens": 5, "sampling": {"min_tokens": 6}},
            "between 0 and 5 (max_tokens, or the room left in the context), got 6",
        ),
        ({"sampling": {"min_tokens": 62}}, "sampling.min_tokens must be between 0 and 61"),
        (
            {"max_tokens": 62},
            "context length is 64 tokens, of which the prompt has 3: at most 61 are left, got 62;",
        ),
        ({"sampling": {"logit_bias": {400: 1.0}}}, "sampling.logit_bias: token id 400 is out of"),
        ({"sampling": {"logit_bias": {4: math.nan}}}, "sampling.logit_bias[4] must be between"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature must be 0 (greedy)"),
        ({"token_ids": {"ids": [400]}}, "token id 400 is out of range; target has ids 0 to 399"),
        ({"token_ids": {"ids": []}}, "prompt: no token ids"),
        ({"token_ids": {"ids": [1] * 64}}, "length is 64 tokens, but it has 64;"),
        ({"text": ""}, "prompt: text is empty"),
        ({"chat": {}}, "chat.messages: is empty"),
        ({"stop": [""]}, "stop: each string must have 1 to 1024 characters, got 0"),
        ({"stop": ["a"] * 17}, "stop: at most 16 strings allowed, got 17"),
    ],
)
def test_what_is_refused(plan: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plan(**fields)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rule": {"name": "x"}}, "rule.name must be one of exact, fly, "),
        ({"rule": {"margin_threshold": 0.1}}, f"does not apply to the rule {DEFAULT_RULE!r}"),
        ({"rule": {"window_scope": 9}}, "rule.window_scope: 9 is not one of"),
        ({"rule": {"name": "fly", "fly_window_size": 2000}}, "between 0 and 1024, got 2000"),
        ({"rule": {"name": "fly-paper", "fly_entropy_threshold": 1.5}}, "between 0 and 1"),
        (
            {"rule": {"name": "fly", "guarded_token_ids": [1, 400]}},
            "rule.guarded_token_ids: token id 400 is out of range; target has ids 0 to 399",
        ),
        (
            {"num_speculative_tokens": 33},
            "_tokens must be an integer between 0 and 32",
        ),
        (
            {"num_draft_tokens_per_round": [4, 0, 33]},
            "[2] must be an integer between 0 and 32",
        ),
        (
            {"num_speculative_tokens": 4, "num_draft_tokens_per_round": [4, 5]},
            "speculation.num_draft_tokens_per_round[1] must be an integer between 0 and 4, got 5",
        ),
        (
            {"adaptive": True, "num_speculative_tokens": 0},
            "adaptive and num_speculative_tokens are both given; set one of them",
        ),
        ({"max_loose_cost_nats": -0.5}, "must be finite and at least 0, got -0.5"),
        ({"max_loose_cost_nats": math.nan}, "and at least 0, got nan"),
        ({"max_loose_cost_nats": math.inf}, "and at least 0, got inf"),
    ],
)
def test_speculation_that_is_refused(plan: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        plan(speculation=fields)
    assert message in str(caught.value)


def test_a_request_without_a_prompt() -> None:
    with pytest.raises(InvalidArgumentError, match="prompt: set one of text, token_ids, chat"):
        wire.decode(GenerationRequest, generation_pb2.GenerateRequest())


@pytest.mark.parametrize("name", RULE_PRESETS)
def test_only_lossy_rules_have_a_loop_guard(plan: Any, name: str) -> None:
    made = plan(speculation=speculation(rule=common_pb2.Rule(name=name)))
    assert made.judging.loop_guard == (name not in ("exact", "rejection"))


def test_a_judge_gives_its_threshold_and_stays_the_same(plan: Any) -> None:
    made = plan(speculation={"rule": {"name": "autojudge"}})
    assert made.judging.rule.judge_threshold == 0.25
    assert made.judging.judge_fingerprint == "j"
    asked = plan(speculation={"rule": {"name": "autojudge", "judge_threshold": 0.5}})
    assert asked.judging.rule.judge_threshold == 0.5
    assert plan(speculation={"rule": {"name": "fly"}}).judging.judge_fingerprint == ""
    limited = RuleBook.model_validate({"limits": {"max_judge_threshold": 0.2}})
    with pytest.raises(InvalidArgumentError, match=r"at most 0\.2 .*got 0\.25, the rule's default"):
        plan(rules=limited, speculation={"rule": {"name": "autojudge"}})


def test_the_servers_defaults(plan: Any) -> None:
    book = RuleBook.model_validate({"rules": {"mine": {"preset": "typical", "typical_delta": 0.5}}})
    settings = {"rule": "mine", "num_speculative_tokens": 40}
    made = plan(rules=book, settings=settings)
    assert made.drafts.num_speculative_tokens == MAX_DRAFT
    assert made.judging.rule == resolve_rule(Rule("typical", typical_delta=0.5), MAX_DRAFT)
    made = plan(
        rules=book, settings=settings,
        speculation={"rule": {"typical_epsilon": 0.2}, "num_speculative_tokens": 4},
    )  # fmt: skip
    assert made.judging.rule == resolve_rule(
        Rule("typical", typical_delta=0.5, typical_epsilon=0.2), 4
    )


def test_k_adapts_if_asked_to_or_behind_the_rounds_of_an_earlier_run(plan: Any) -> None:
    fixed, auto = {"num_speculative_tokens": 4}, {"num_speculative_tokens": "auto"}
    across = {"name": "margin", "margin_threshold": 1.0}
    across["window_scope"] = "WINDOW_SCOPE_ACROSS_ROUNDS"
    earlier = {"num_draft_tokens_per_round": [3, 0]}
    for settings, fields, expected in (
        (fixed, {"adaptive": True}, (True, MAX_DRAFT, 15)),
        (fixed, earlier, (True, MAX_DRAFT, 15)),
        ({}, earlier | fixed, (False, 4, 0)),
        ({}, {"adaptive": True, "rule": across}, (True, 15, 15)),
        ({}, {"adaptive": True, "rule": {"name": "exact"}}, (True, MAX_DRAFT, 0)),
        (fixed, {}, (False, 4, 0)),
        (auto, fixed, (False, 4, 0)),
    ):
        made = plan(settings=settings, speculation=speculation(**fields))
        drafts, judging = made.drafts, made.judging
        found = drafts.adaptive, drafts.num_speculative_tokens, judging.judged_k
        assert found == expected, (settings, fields)
        if judging.judged_k and "rule" not in fields:
            assert judging.rule == resolve_rule(Rule(DEFAULT_RULE), 15)
        recorded = fields.get("num_draft_tokens_per_round", [])
        assert [*drafts.num_draft_tokens_per_round] == recorded


def test_a_window_that_a_named_rule_gives_is_chosen(plan: Any) -> None:
    book = RuleBook.model_validate({"rules": {"mine": {"preset": "fly", "fly_window_size": 1}}})
    made = plan(rules=book, speculation={"rule": {"name": "mine"}, "num_speculative_tokens": 2})
    assert (made.judging.rule.fly_window_size, made.warnings) == (1, ())


def test_the_operators_limits(plan: Any) -> None:
    limits = {
        "max_num_speculative_tokens": 8, "max_loose_tokens": 3, "max_loose_cost_nats": 1.5,
        "max_margin_threshold": 0.3, "require_loop_guard": True,
    }  # fmt: skip
    book = RuleBook.model_validate({"limits": limits})
    made = plan(rules=book)
    assert made.drafts.num_speculative_tokens == 8
    assert made.judging.allowed == Budget(3, 1.5)
    for fields, message in (
        (
            {"num_speculative_tokens": 9},
            "_tokens must be an integer between 0 and 8",
        ),
        ({"max_loose_tokens": 4}, "speculation.max_loose_tokens must be between 0 and 3 on this"),
        ({"max_loose_cost_nats": 2.0}, "speculation.max_loose_cost_nats must be between 0 and 1.5"),
        ({"disable_loop_guard": True}, "speculation.disable_loop_guard must be false on this"),
        ({"rule": {"name": "margin", "margin_threshold": 1.0}}, "at most 0.3 on this server"),
    ):
        with pytest.raises(InvalidArgumentError) as caught:
            plan(rules=book, speculation=fields)
        assert message in str(caught.value)
