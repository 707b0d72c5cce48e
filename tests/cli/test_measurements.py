"""Prompts and conditions of `bench` and `eval`; measuring itself is tested through the CLI."""

from __future__ import annotations

import pytest

from flyspec.cli.conditions import Condition
from flyspec.client import Chat
from flyspec.prompts import Prompt
from flyspec.rules import Divergence, Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.phases import Phase
from flyspec_lab.bench.conditions import (
    ALL_CONDITIONS,
    CONDITIONS,
    by_k,
    parse_conditions,
    parse_ks,
    with_plain,
)


def test_questions_are_asked_and_code_is_continued() -> None:
    question, code = Prompt("Q", "gsm8k"), Prompt("def f", "humaneval")
    assert isinstance(question.to_request(), Chat)
    assert code.to_request() == "def f"
    assert question.to_request(False) == "Q"
    assert isinstance(code.to_request(True), Chat)


# --- how rules are named ----------------------------------------------------------------------


def test_rules_are_named_with_their_parameters() -> None:
    found = parse_conditions(
        "plain, fly,margin:margin_threshold=0.2,fly_window_size=4,num_speculative_tokens=4,"
        "fuzzy:divergence=kl,mine:window_scope=across_rounds"
    )
    assert found == (
        Condition("plain", Rule("exact"), 0),
        Condition("fly", Rule("fly")),
        Condition(
            "margin:margin_threshold=0.2,fly_window_size=4,num_speculative_tokens=4",
            Rule("margin", margin_threshold=0.2, fly_window_size=4),
            4,
        ),
        Condition("fuzzy:divergence=kl", Rule("fuzzy", divergence=Divergence.KL)),
        Condition(
            "mine:window_scope=across_rounds",
            Rule("mine", window_scope=WindowScope.ACROSS_ROUNDS),
        ),
    )


def test_phases_are_rules_with_the_texts_between_them() -> None:
    found = parse_conditions(
        "fly until #### then exact,"
        "relaxed:relaxed_delta=0.2,max_loose_tokens=5,num_speculative_tokens=7 "
        "until </think>\n then "
        "margin:max_loose_cost_nats=1.5 until token:42 then exact,margin:max_loose_tokens=3,typical"
    )
    relaxed = Rule("relaxed", relaxed_delta=0.2)
    assert [c.phases for c in found] == [
        (Phase(Rule("fly"), ("####",)), Phase(Rule("exact"))),
        (
            Phase(relaxed, ("</think>",), max_loose_tokens=5),
            Phase(Rule("margin"), (), (42,), max_loose_cost_nats=1.5),
            Phase(Rule("exact")),
        ),
        (Phase(Rule("margin"), max_loose_tokens=3),),
        (),
    ]
    assert [(c.rule, c.num_speculative_tokens) for c in found] == [
        (Rule("fly"), None), (relaxed, 7), (Rule("margin"), None), (Rule("typical"), None),
    ]  # fmt: skip
    assert found[0].name == "fly until #### then exact"


def test_all_is_every_preset_without_a_judge_and_plain_decoding_comes_first() -> None:
    assert parse_conditions("all") == ALL_CONDITIONS
    assert {c.rule.name for c in ALL_CONDITIONS} == set(RULE_PRESETS) - {"autojudge"}
    assert with_plain(parse_conditions("fly")) == (CONDITIONS[0], Condition("fly", Rule("fly")))
    assert with_plain(CONDITIONS) == CONDITIONS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no rule"),
        ("fly,fly", "names 'fly' twice"),
        ("fly,fly_window_size=4", "no rule name before a colon"),
        ("margin:threshold=1", "parameters are num_speculative_tokens, fly_window_size"),
        ("margin:margin_threshold", "must be PARAMETER=VALUE"),
        ("margin:margin_threshold=x", "margin_threshold must be a number, got 'x'"),
        ("fly:fly_window_size=-1", "fly_window_size must be an integer, 0 or more, got '-1'"),
        ("fuzzy:divergence=hellinger", "divergence must be one of js, kl, tv, got 'hellinger'"),
        (":fly_window_size=1", "no rule name"),
        ("fly until ####", "no rule name before a colon"),
        ("fly until #### then", "no rule name before a colon"),
        ("fly until # then exact:num_speculative_tokens=4", "in the first phase"),
        ("fly:max_loose_tokens=x until # then exact", "max_loose_tokens must be an integer"),
    ],
)
def test_rules_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_conditions(text)


def test_ks_are_numbers_or_the_server_s_choice() -> None:
    assert parse_ks("auto") == ("auto",)
    assert parse_ks("auto, 0,15") == ("auto", 0, 15)
    for text in ("", "x", "-1", "4,4", "1.5"):
        with pytest.raises(ValueError, match=r"must be an integer|names no K"):
            parse_ks(text)
    rules = parse_conditions(
        "fly,margin:num_speculative_tokens=auto,exact:num_speculative_tokens=2"
    )
    names = [(c.name, c.requested_k(7)) for c in by_k(rules, ("auto", 0, 4))]
    assert names == [
        ("fly, K auto", "auto"), ("fly, K 4", 4), (rules[1].name, "auto"), (rules[2].name, 2),
    ]  # fmt: skip
    assert [(c.name, c.requested_k("auto")) for c in by_k(rules[:1], (9,))] == [("fly", 9)]
    assert rules[0].requested_k(7) == 7
