"""Named rules and the operator's limits: valid rules files, and their effect on requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.rule_files import NamedRule, RuleBook, load_rules, read_rules
from flyspec.rules import PARAMETERS, Divergence, EntropyMeasure, Rule, WindowScope
from flyspec.rules.limits import Limits
from flyspec.rules.presets import DEFAULT_RULE, RULE_PRESETS
from flyspec.rules.resolve import resolve_rule

NORMALIZED, TOP_K = EntropyMeasure.NORMALIZED, EntropyMeasure.TOP_K
ROOT = Path(__file__).resolve().parents[2]

FILE = """
[rules.careful]
preset = "fly"
fly_window_size = 8
fly_entropy_threshold = 1  # a whole number is a number
fly_entropy_top_k = 5
guarded_token_ids = [11, 7]

[rules.llama]
preset = "margin"
window_scope = "across_rounds"
margin_threshold = 0.2

[rules.close]
preset = "fuzzy"
divergence = "tv"
divergence_threshold = 0.05

[limits]
max_margin_threshold = 0.25
"""
FLY = "[rules.a]\npreset = 'fly'\n"


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def to_file(text: str) -> Path:
        path = tmp_path / "rules.toml"
        path.write_text(text)
        return path

    return to_file


def limited(rules: dict[str, Any] | None = None, **limits: Any) -> RuleBook:
    return RuleBook.model_validate({"rules": rules or {}, "limits": limits})


# --- named rules ----------------------------------------------------------------------------


def test_a_named_rule_is_its_preset_with_its_parameters(write: Any) -> None:
    book = read_rules(write(FILE))
    assert book.resolve(Rule("careful"), 15) == Rule(
        "fly", 8, 1.0, 5, TOP_K, WindowScope.WITHIN_ROUND, guarded_token_ids=(7, 11)
    )
    assert book.resolve(Rule("llama"), 4) == resolve_rule(Rule("margin", margin_threshold=0.2), 4)
    assert book.resolve(Rule("close"), 4) == resolve_rule(
        Rule("fuzzy", divergence=Divergence.TV, divergence_threshold=0.05), 4
    )


def test_the_request_wins_over_the_named_rule_and_guards_are_joined(write: Any) -> None:
    book = read_rules(write(FILE))
    rule = book.resolve(Rule("careful", fly_window_size=2, guarded_token_ids=(9, 7)), 15)
    assert (rule.fly_window_size, rule.fly_entropy_threshold) == (2, 1.0)
    assert rule.guarded_token_ids == (7, 9, 11)


def test_another_measure_takes_no_threshold_of_the_named_rule(write: Any) -> None:
    book = read_rules(write(FILE))
    rule = book.resolve(Rule("careful", entropy_measure=NORMALIZED), 15)
    assert (rule.fly_entropy_threshold, rule.fly_entropy_top_k) == (0.3, None)
    assert rule.fly_window_size == 8
    same = book.resolve(Rule("careful", entropy_measure=TOP_K), 15)
    assert (same.fly_entropy_threshold, same.fly_entropy_top_k) == (1.0, 5)
    rule = book.resolve(Rule("close", divergence=Divergence.KL), 4)
    assert rule.divergence_threshold == 0.1


def test_names_on_offer(write: Any) -> None:
    book = read_rules(write(FILE))
    assert book.names("fly", ["exact", "fly", "margin"]) == [
        "fly", "exact", "margin", "careful", "llama",
    ]  # fmt: skip
    assert book.names("llama")[0] == "llama"
    assert RuleBook().names("fly") == ["fly", *(n for n in RULE_PRESETS if n != "fly")]


def test_a_file_can_say_all_that_a_rule_can() -> None:
    assert set(NamedRule.model_fields) == {"preset", "guarded_token_ids", *PARAMETERS}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[rules", "invalid TOML: "),
        ("colour = 1", "colour: Extra inputs are not permitted"),
        ("[rules.fly]\npreset = 'fly'", "rules.fly: the name is taken by a preset"),
        ("[rules.a]", "rules.a.preset: Field required"),
        ("[rules.A]\npreset = 'fly'", "rules.A"),
        ("[rules.a]\npreset = 'flu'", "rules.a.preset must be one of exact, fly, "),
        (f"{FLY}tau = 1", "rules.a.tau: Extra inputs are not permitted"),
        (f"{FLY}margin_threshold = 1.0", "rules.a.margin_threshold does not apply to the rule"),
        (f"{FLY}fly_window_size = 9999", "rules.a.fly_window_size must be an integer between"),
        (f"{FLY}fly_window_size = 2.5", "rules.a.fly_window_size: "),
        (f"{FLY}fly_window_size = true", "rules.a.fly_window_size: "),
        (f"{FLY}fly_window_size = '2'", "rules.a.fly_window_size: "),
        ("[rules.a]\npreset = 'margin'\nmargin_threshold = nan", "rules.a.margin_threshold: "),
        ("[rules.a]\npreset = 'margin'\nmargin_threshold = inf", "rules.a.margin_threshold: "),
        ("[rules.a]\npreset = 'fuzzy'\ndivergence = 'x'", "divergence: must be one of js, kl, tv"),
        ("[rules.a]\npreset = 'fuzzy'\ndivergence = [1]", "rules.a.divergence: must be one of"),
        (f"{FLY}guarded_token_ids = [-1]", "rules.a.guarded_token_ids.0: "),
        ("[limits]\nmax_tau = 1", "limits.max_tau: Extra inputs are not permitted"),
        ("[limits]\nmax_margin_threshold = -1", "limits.max_margin_threshold: "),
        ("[limits]\nmax_margin_threshold = nan", "limits.max_margin_threshold: "),
        ("[limits]\nmax_loose_cost_nats = inf", "limits.max_loose_cost_nats: "),
        ("[limits]\nmax_random_acceptance = 1.5", "limits.max_random_acceptance: "),
        ("[limits]\nmax_divergence_threshold = 'x'", "must be a number, or a table of numbers for"),
        ("[limits]\nmax_divergence_threshold = {jss = 1}", "limits.max_divergence_threshold.jss"),
        ("[limits]\nmin_fly_entropy_threshold = -1", "limits.min_fly_entropy_threshold."),
        ("[limits]\nallowed_rules = ['a']", "limits.allowed_rules: 'a' is not a rule; choose from"),
        ("[limits]\nallowed_rules = []", "limits.allowed_rules: "),
        (
            "[limits]\nlossless_only = true\nallowed_rules = ['fly']",
            "lossless_only excludes all of",
        ),
    ],
)
def test_errors_name_the_file_and_the_key(write: Any, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError) as caught:
        read_rules(path)
    assert str(caught.value).startswith(f"--rules-file {path}: ")
    assert message in str(caught.value)


def test_all_errors_of_a_file_are_told_at_once(write: Any) -> None:
    path = write("[rules.a]\npreset = 'fly'\nx = 1\n[limits]\ny = 2")
    with pytest.raises(ConfigError, match=r"rules\.a\.x: .*; limits\.y: "):
        read_rules(path)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere: cannot be read: No such file"):
        read_rules(tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b"# \xe9")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_rules(tmp_path / "latin")


# --- limits to rules ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "rule", "inside", "beyond", "must_be"),
    [
        ({"min_fly_window_size": 4}, "fly", 4, 3, "at least 4"),
        ({"min_fly_entropy_threshold": 0.25}, "fly", 0.25, 0.24, "at least 0.25"),
        ({"max_fly_entropy_top_k": 4}, "fly", 4, 5, "at most 4"),
        ({"max_margin_threshold": 0.4}, "margin", 0.4, 0.41, "at most 0.4"),
        ({"max_divergence_threshold": 0.2}, "fuzzy", 0.2, 0.3, "at most 0.2"),
        ({"min_divergence_top_k": 20}, "fuzzy", 20, 2, "at least 20, or 0,"),
        ({"min_divergence_top_k": 0}, "fuzzy", 0, 1024, "0"),
        # Its default is 0, the whole vocabulary.
        ({"min_divergence_top_k": 20}, "fuzzy-reference", None, 19, "at least 20, or 0,"),
        ({"min_typical_epsilon": 0.05}, "typical", 0.05, 0.04, "at least 0.05"),
        ({"min_typical_delta": 0.2}, "typical", 0.2, 0.1, "at least 0.2"),
        ({"max_random_acceptance": 0.2}, "random", 0.2, 0.21, "at most 0.2"),
        ({"max_judge_threshold": 0.2}, "autojudge", 0.2, 0.21, "at most 0.2"),
    ],
)
def test_beyond_a_limit_is_refused(
    limit: dict[str, Any], rule: str, inside: Any, beyond: Any, must_be: str
) -> None:
    parameter = next(iter(limit)).partition("_")[2]
    within, outside = (Rule(rule, **{parameter: value}) for value in (inside, beyond))
    book = limited(**limit)
    assert book.resolve(within, 15) == resolve_rule(within, 15)
    with pytest.raises(InvalidArgumentError) as caught:
        book.resolve(outside, 15)
    assert str(caught.value) == f"rule.{parameter} must be {must_be} on this server, got {beyond}"
    assert RuleBook().resolve(outside, 15) == resolve_rule(outside, 15)


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [({"allowed_rules": ["exact", "margin"]}, "margin"), ({"lossless_only": True}, "rejection")],
)
def test_other_rules_than_those_allowed_are_refused(limit: dict[str, Any], allowed: str) -> None:
    assert limited(**limit).resolve(Rule(allowed), 15).name == allowed
    message = rf"rule\.name must be one of exact, {allowed} on this server, got 'fly'"
    with pytest.raises(InvalidArgumentError, match=message):
        limited(**limit).resolve(Rule("fly"), 15)


def test_every_limit_to_a_parameter_has_its_name() -> None:
    named = {n.partition("_")[2] for n in Limits.model_fields if n.startswith(("min_", "max_"))}
    assert named - set(PARAMETERS) == {
        "num_speculative_tokens", "loose_tokens", "loose_cost_nats",
    }  # fmt: skip


def test_a_preset_beyond_a_limit_says_that_the_value_is_its_own() -> None:
    book = limited(max_margin_threshold=0.2)
    with pytest.raises(InvalidArgumentError) as caught:
        book.resolve(Rule("margin"), 15)
    assert str(caught.value) == (
        "rule.margin_threshold must be at most 0.2 on this server, got 0.3, the rule's "
        "default; set another"
    )


def test_limits_by_measure_refuse_other_measures() -> None:
    book = limited(
        min_fly_entropy_threshold={"top_k": 0.2}, max_divergence_threshold={"js": 0.2, "tv": 0.4}
    )
    assert book.resolve(Rule("fly", fly_entropy_threshold=0.2), 15)
    with pytest.raises(
        InvalidArgumentError,
        match=r"rule\.entropy_measure must be one of top_k on this server, got normalized",
    ):
        book.resolve(Rule("fly-paper"), 15)
    tv = Rule("fuzzy", divergence=Divergence.TV, divergence_threshold=0.4)
    assert book.resolve(tv, 15)
    with pytest.raises(InvalidArgumentError, match=r"at most 0\.2 on this server, got 0.4"):
        book.resolve(Rule("fuzzy", divergence_threshold=0.4), 15)
    with pytest.raises(InvalidArgumentError, match=r"rule\.divergence must be one of js, tv"):
        book.resolve(Rule("fuzzy", divergence=Divergence.KL), 15)
    assert book.resolve(Rule("exact"), 15) == Rule("exact")


def test_the_released_divergences_have_limits_of_their_own() -> None:
    """JS is at most ln 2, the reversed form is unbounded: one number cannot limit both."""
    book = limited(max_divergence_threshold={"js": 0.1, "reference_js": 0.4})
    assert book.resolve(Rule("fuzzy"), 15)
    assert book.resolve(Rule("fuzzy-reference", divergence_threshold=0.4), 15)
    for rule in (
        Rule("fuzzy", divergence_threshold=0.4),
        Rule("fuzzy-reference", divergence_threshold=0.5),
        Rule("fuzzy-reference", divergence=Divergence.KL),
    ):
        with pytest.raises(InvalidArgumentError):
            book.resolve(rule, 15)
    only = limited(max_divergence_threshold={"js": 0.1})
    with pytest.raises(
        InvalidArgumentError, match=r"rule\.name: .* limits allow no divergence for 'fuzzy-ref"
    ):
        only.resolve(Rule("fuzzy-reference"), 15)
    assert limited(max_divergence_threshold=0.3).resolve(Rule("fuzzy-reference"), 15)


def test_what_loses_nothing_is_not_limited() -> None:
    rule = Rule("rejection", divergence_top_k=2)
    assert limited(min_divergence_top_k=20).resolve(rule, 15) == rule


def test_the_window_that_depends_on_k_is_raised_not_refused() -> None:
    book = limited(min_fly_window_size=4)
    assert [book.resolve(Rule("fly"), k).fly_window_size for k in (2, 4, 6, 15)] == [4, 4, 5, 6]
    with pytest.raises(InvalidArgumentError, match="at least 4 on this server, got 0, the rule's"):
        book.resolve(Rule("typical"), 15)


def test_limits_hold_for_named_rules() -> None:
    rules = {"mine": {"preset": "margin", "margin_threshold": 0.2}}
    book = limited(rules, max_margin_threshold=0.25)
    assert book.resolve(Rule("mine"), 4).margin_threshold == 0.2
    with pytest.raises(InvalidArgumentError, match=r"at most 0\.25 on this server, got 0.3"):
        book.resolve(Rule("mine", margin_threshold=0.3), 4)
    assert "mine" not in limited(rules, lossless_only=True).names("exact")
    book = limited(rules, allowed_rules=["mine"])
    assert book.names("mine") == ["mine"]
    assert book.resolve(Rule("mine"), 4).name == "margin"
    with pytest.raises(InvalidArgumentError, match="must be one of mine on this server"):
        book.resolve(Rule("margin"), 4)


def test_budgets_are_those_of_the_operator_unless_smaller() -> None:
    limits = Limits(max_loose_tokens=5, max_loose_cost_nats=2.5)
    assert [limits.bound("max_loose_tokens", n) for n in (None, 0, 5)] == [5, 0, 5]
    assert [limits.bound("max_loose_cost_nats", c) for c in (None, 0.0, 2.5)] == [2.5, 0.0, 2.5]
    with pytest.raises(InvalidArgumentError, match=r"max_loose_tokens must be between 0 and 5 .*6"):
        limits.bound("max_loose_tokens", 6)
    with pytest.raises(InvalidArgumentError, match=r"max_loose_cost_nats must be between 0 and 2"):
        limits.bound("max_loose_cost_nats", 2.6)
    assert Limits().bound("max_loose_tokens", None) is None
    assert Limits().bound("max_loose_tokens", 7) == 7


# --- at the start ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "rule", "k", "message"),
    [
        ("lossless_only = true", "fly", 15, "--rule fly: rule.name must be one of exact, reject"),
        ("allowed_rules = ['exact']", "careful", 15, "--rule careful: rule.name must be one of"),
        ("min_fly_entropy_threshold = 0.5", "fly", 15, "--rule fly: rule.fly_entropy_threshold "),
        ("max_num_speculative_tokens = 8", "fly", 9, "--num-speculative-tokens 9: exceeds limits"),
        ("min_fly_window_size = 9", "exact", 4, "rules.careful: rule.fly_window_size must be at"),
    ],
)
def test_defaults_beyond_a_limit_are_refused_at_the_start(
    write: Any, limits: str, rule: str, k: int, message: str
) -> None:
    named = "[rules.careful]\npreset = 'fly'\nfly_window_size = 8\nfly_entropy_threshold = 0.6\n"
    path = write(f"{named}[limits]\n{limits}")
    with pytest.raises(ConfigError) as caught:
        load_rules(str(path), rule, k)
    assert message in str(caught.value)


def test_a_named_default(write: Any) -> None:
    book = load_rules(str(write(FILE)), "careful", 15)
    assert book.names("careful")[0] == "careful"
    with pytest.raises(ConfigError, match=r"--rule other: rule\.name must be one of exact, fly"):
        load_rules("", "other", 15)


def test_guarded_tokens_that_the_target_does_not_have(write: Any) -> None:
    book = read_rules(write(FILE))
    book.check_vocabulary(12)
    with pytest.raises(ConfigError, match=r"rules\.careful\.guarded_token_ids: 11 .* 0 to 10"):
        book.check_vocabulary(11)


def test_the_file_in_the_documentation(write: Any) -> None:
    text = (ROOT / "docs" / "rules.md").read_text()
    (example,) = [
        t for part in text.split("```toml\n")[1:] if "[limits]" in (t := part.split("```")[0])
    ]
    book = load_rules(str(write(example)), DEFAULT_RULE, 15)
    assert book.names(DEFAULT_RULE) == [DEFAULT_RULE, "exact", "fly", "margin", "careful"]
    for name in Limits.model_fields:
        assert f"`{name}`" in text
