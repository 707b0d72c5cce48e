"""Grids multiply conditions where they apply; arms that make equal samples are one."""

from __future__ import annotations

import json

import pytest

from flyspec.errors import ConfigError
from flyspec.rules.presets import RULE_PRESETS
from flyspec_lab.arms import Arm, controls_of, make_arms, parse_grid, rival_arm
from flyspec_lab.bench.conditions import parse_conditions

RULES = [*RULE_PRESETS]


def arms(rules: str, *grid: str, k: int | str = "auto", known: list[str] = RULES) -> list[Arm]:
    return make_arms(parse_conditions(rules), parse_grid(grid), k, "model", known)  # type: ignore[arg-type]


def test_a_grid_makes_every_combination() -> None:
    found = arms("fly", "K=4,8,15 W=0,2")
    assert [arm.name for arm in found] == [
        "plain",
        "fly, K = 4, W = 0", "fly, K = 4, W = 2",
        "fly, K = 8, W = 0", "fly, K = 8, W = 2",
        "fly, K = 15, W = 0", "fly, K = 15, W = 2",
    ]  # fmt: skip
    assert [(arm.k, arm.rule.fly_window_size) for arm in found[1:3]] == [(4, 0), (4, 2)]
    assert found[0].k == 0


def test_names_and_symbols_mean_the_same() -> None:
    for names in (("K=4 theta=0.5",), ("num_speculative_tokens=4", "fly_entropy_threshold=0.5"),
                  ("K=4", "θ=0.5")):  # fmt: skip
        (_, arm) = arms("fly", *names)
        assert (arm.k, arm.rule.fly_entropy_threshold) == (4, 0.5)
    (_, arm) = arms("margin", "tau=0.2")
    assert arm.rule.margin_threshold == 0.2
    # δ is another parameter of each rule that has one.
    found = arms("typical,cactus,relaxed", "delta=0.25")
    assert found[1].rule.typical_delta == 0.25
    assert found[2].rule.cactus_delta == 0.25
    assert found[3].rule.relaxed_delta == 0.25


def test_a_parameter_that_a_rule_does_not_have_leaves_it_as_it_is() -> None:
    names = [arm.name for arm in arms("exact,fly", "W=0,6")]
    assert names == ["plain", "exact", "fly, W = 0", "fly, W = 6"]


def test_a_condition_keeps_what_it_sets() -> None:
    found = arms("fly:fly_window_size=3,margin:num_speculative_tokens=4", "W=0,6 K=8")
    assert [(arm.rule.fly_window_size, arm.k) for arm in found[1:]] == [(3, 8), (0, 4), (6, 4)]


def test_arms_that_make_equal_samples_are_one() -> None:
    # With K auto, the window of `fly` is 6 unless given.
    found = arms("fly,fly:fly_window_size=6,margin,margin:margin_threshold=0.3")
    assert [arm.name for arm in found] == ["plain", "fly", "margin"]


def test_drafters_can_be_compared() -> None:
    found = arms("exact,plain", "drafter=model,prompt_lookup K=0,4")
    assert [(a.name, a.drafter) for a in found] == [
        ("plain", ""),
        ("exact, drafter = model, K = 4", "model"),
        ("exact, drafter = prompt_lookup, K = 4", "prompt_lookup"),
    ]


def test_a_rule_of_the_server_is_taken_as_it_is() -> None:
    (_, arm) = arms("careful", "W=1", known=[*RULES, "careful"])
    assert json.loads(arm.rule_json) == {"name": "careful", "fly_window_size": 1}


def test_the_key_has_all_parameters() -> None:
    (_, arm) = arms("fly")
    document = json.loads(arm.rule_json)
    assert document["fly_window_size"] == 6
    assert document["entropy_measure"] == "TOP_K"
    assert arm.condition.rule.fly_window_size is None  # requests leave it to the server
    (_, short) = arms("fly", k=4)
    assert json.loads(short.rule_json)["fly_window_size"] == 3


def test_phases_keep_their_rules() -> None:
    phased = "fly until #### then exact"
    found = arms(f"{phased},fly", "W=0,2 K=4,8")
    assert [(arm.name, arm.k) for arm in found[1:3]] == [
        (f"{phased}, K = 4", 4), (f"{phased}, K = 8", 8),
    ]  # fmt: skip
    assert len(found) == 1 + 2 + 4
    document = json.loads(found[1].rule_json)
    assert [p["rule"]["name"] for p in document["phases"]] == ["fly", "exact"]
    assert document["phases"][0]["until"] == ["####"]
    assert found[1].key != arms("fly", "K=4")[1].key
    assert next(iter(controls_of(parse_conditions(phased)))).name.startswith("random")


def test_controls_are_random_choices_and_no_window() -> None:
    controls = controls_of(parse_conditions("exact,fly,typical,margin,fly:fly_window_size=0"))
    names = [c.name for c in controls]
    assert names[:2] == ["fly, W = 0", "margin, W = 0"]
    assert all(name.startswith("random:") for name in names[2:])
    assert len(names) > 3


def test_a_rival_decodes_plainly() -> None:
    arm = rival_arm("small")
    assert (arm.name, arm.k, arm.rival) == ("small alone", 0, True)
    assert arm.key != arms("plain")[0].key


@pytest.mark.parametrize(
    ("rules", "grid", "message"),
    [
        ("exact", "W=0,6", "no condition that is compared takes it"),
        ("fly", "X=0,6", "no condition that is compared takes it; parameters are K, drafter"),
        ("fly", "W=x", r"--grid W=x: must be an integer, 0 or more"),
        ("fly", "K=x", r"--grid K=x: must be a number or auto"),
        ("fly", "K=1", r"'fly, K = 1': speculation.num_speculative_tokens must be 0 or at least 2"),
        ("fly", "theta=77", r"'fly, theta = 77': rule.fly_entropy_threshold"),
        ("margin:margin_threshold=-1", "", "rule.margin_threshold"),
        ("fly until x then exat", "", r"no rule 'exat' \(did you mean exact\?\)"),
        ("flyy", "", r"the server has no rule 'flyy' \(did you mean fly\?\); it has exact"),
    ],
)
def test_what_cannot_be_compared(rules: str, grid: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        arms(rules, *filter(None, [grid]))


@pytest.mark.parametrize("text", ["W", "=1", "W=", "W=1 W=2", "W=1,1"])
def test_grids_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ValueError, match=r"must be PARAMETER=VALUE|twice"):
        parse_grid([text])
