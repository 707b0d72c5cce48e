"""The operator's rules file: named rules, and limits on what requests may use.

    [rules.careful]             # requests may name it like a preset
    preset = "fly"
    fly_entropy_threshold = 0.6
    guarded_token_ids = [11, 13]

    [limits]
    allowed_rules = ["exact", "fly", "careful"]
    min_fly_entropy_threshold = 0.3
    max_loose_cost_nats = 20.0

A rule has a preset's name and any parameters of `Rule`; for the limits, see `Limits`. Errors name
the file and the key.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model

from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.rules import PARAMETERS, Parameter, Rule, member_name
from flyspec.rules.limits import Limits
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import (
    measure_of,
    resolve_rule,
    rule_warnings,
    validate_rule,
    window_depends_on_k,
)
from flyspec.speculation_length import AUTO, SpeculationLength, requested
from flyspec.spelling import did_you_mean
from flyspec.values.admin import JudgeInfo


def _type_of(parameter: Parameter) -> Any:
    """Return a parameter's type in the file, where enum members are given by name."""
    if not parameter.members:
        return parameter.kind
    members = {member_name(m): m for m in parameter.members}

    def to_member(value: Any) -> Any:
        if not isinstance(value, str) or value not in members:
            raise ValueError(f"must be one of {', '.join(members)}")
        return members[value]

    return Annotated[parameter.kind, BeforeValidator(to_member)]


class _NamedRule(BaseModel):
    """A preset with parameters, named by the operator; the fields are those of `Rule`."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    preset: str
    guarded_token_ids: list[Annotated[int, Field(ge=0)]] = []

    def to_rule(self) -> Rule:
        given = {name: getattr(self, name) for name in PARAMETERS}
        return Rule(self.preset, **given, guarded_token_ids=tuple(self.guarded_token_ids))


if TYPE_CHECKING:
    NamedRule = _NamedRule
else:
    NamedRule = create_model(
        "NamedRule",
        __base__=_NamedRule,
        __doc__=_NamedRule.__doc__,
        **{p.name: (_type_of(p) | None, None) for p in PARAMETERS.values()},
    )


_RuleName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]*$", max_length=64)]


class RuleBook(BaseModel):
    """A validated rules file; without one, the presets and no limits."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    rules: dict[_RuleName, NamedRule] = {}
    limits: Limits = Limits()

    def names(self, default: str, presets: Iterable[str] = tuple(RULE_PRESETS)) -> list[str]:
        """Return the rules a request may name: the default, then presets, then named rules.

        `presets` are those offered by the target's service.
        """
        offered = {name: name for name in presets}
        offered |= {name: r.preset for name, r in self.rules.items() if r.preset in offered}
        allowed = [name for name in offered if self._allows(name)]
        return sorted(allowed, key=lambda name: name != default)

    def resolve(
        self, rule: Rule, num_speculative_tokens: int, judge: JudgeInfo | None = None
    ) -> Rule:
        """Resolve a request's rule to a preset's rule with every parameter set, within the limits.

        Parameters the request leaves unset come from the named rule, then from the preset, the
        threshold of a judge from the target's `judge`. Tokens guarded by either request or named
        rule are guarded. Raises `InvalidArgumentError`.
        """
        known = rule.name in RULE_PRESETS or rule.name in self.rules
        if not known or not self._allows(rule.name):
            names = ", ".join(self.names(rule.name))
            where = " on this server" if known else ""
            raise InvalidArgumentError(
                f"rule.name must be one of {names}{where}, got {rule.name!r}"
                f"{did_you_mean(rule.name, self.names(rule.name))}"
            )
        expanded = self._expand(rule)
        resolved = resolve_rule(expanded, num_speculative_tokens)
        if window_depends_on_k(expanded):
            resolved = self._raise_window(resolved)
        if judge and RULE_PRESETS[resolved.name].hidden_layers and resolved.judge_threshold is None:
            resolved = replace(resolved, judge_threshold=judge.threshold)
        self.limits.check_rule(resolved, rule)
        return resolved

    def warnings(self, rule: Rule, resolved: Rule, num_speculative_tokens: int) -> list[str]:
        """Return warnings for the caller about a request's rule as resolved for this K."""
        return rule_warnings(resolved, num_speculative_tokens, self._expand(rule))

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise `ConfigError` if a guarded token is not in the target's vocabulary."""
        for name, rule in self.rules.items():
            if (largest := max(rule.guarded_token_ids, default=0)) >= vocab_size:
                raise ConfigError(
                    f"--rules-file: rules.{name}.guarded_token_ids: {largest} is out of range; the "
                    f"target's token IDs are 0 to {vocab_size - 1}"
                )

    def _allows(self, name: str) -> bool:
        named = self.rules.get(name)
        lossless = RULE_PRESETS[named.preset if named else name].lossless
        allowed = self.limits.allowed_rules
        return (allowed is None or name in allowed) and (lossless or not self.limits.lossless_only)

    def _raise_window(self, rule: Rule) -> Rule:
        """Raise a window size that depends on K to the minimum allowed."""
        floor = self.limits.of_parameter(PARAMETERS["fly_window_size"], rule)
        window = max(rule.fly_window_size or 0, int(floor or 0))
        return replace(rule, fly_window_size=window)

    def _expand(self, rule: Rule) -> Rule:
        """Return a named rule as a rule of its preset, with the request's parameters on top."""
        if rule.name not in self.rules:
            return rule
        base = self.rules[rule.name].to_rule()
        taken: dict[str, Any] = {}
        for name, parameter in PARAMETERS.items():
            by = parameter.measured_by
            if by and getattr(rule, by) not in (None, measure_of(base, parameter)):
                continue
            if getattr(rule, name) is None:
                taken[name] = getattr(base, name)
        guarded = tuple(sorted({*base.guarded_token_ids, *rule.guarded_token_ids}))
        return replace(rule, name=base.name, **taken, guarded_token_ids=guarded)


def load_rules(rules_file: str, rule: str, length: SpeculationLength) -> RuleBook:
    """Read a rules file (empty: none), and check the server's defaults against its limits.

    `rule` and `length` (K) are those defaults. Raises `ConfigError` naming the file and the key, or
    the flag.
    """
    book = read_rules(Path(rules_file)) if rules_file else RuleBook()
    most = book.limits.max_num_speculative_tokens
    num_speculative_tokens = requested(length)
    if most is not None and length != AUTO and length > most:
        raise ConfigError(
            f"--num-speculative-tokens {length}: exceeds limits.max_num_speculative_tokens "
            f"in the rules file, {most}; lower the former or raise the latter"
        )
    try:
        book.resolve(Rule(rule), num_speculative_tokens)
    except InvalidArgumentError as error:
        raise ConfigError(f"--rule {rule}: {error}") from None
    for name in book.rules.keys() & book.names(rule):
        try:
            book.resolve(Rule(name), num_speculative_tokens)
        except InvalidArgumentError as error:
            raise ConfigError(f"--rules-file {rules_file}: rules.{name}: {error}") from None
    return book


def read_rules(path: Path) -> RuleBook:
    """Read and check a rules file. Raises `ConfigError`."""
    try:
        book = RuleBook.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        _check(book)
        return book
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        problem = "not UTF-8 text"
    except tomllib.TOMLDecodeError as error:
        problem = f"invalid TOML: {error}"
    except ValidationError as error:
        problem = "; ".join(
            f"{'.'.join(map(str, p['loc']))}: {p['msg'].removeprefix('Value error, ')}"
            for p in error.errors()
        )
    except InvalidArgumentError as error:
        problem = str(error)
    raise ConfigError(f"--rules-file {path}: {problem}")


def _check(book: RuleBook) -> None:
    for name, rule in book.rules.items():
        if name in RULE_PRESETS:
            raise InvalidArgumentError(
                f"rules.{name}: the name is taken by a preset; choose another"
            )
        if rule.preset not in RULE_PRESETS:
            raise InvalidArgumentError(
                f"rules.{name}.preset must be one of {', '.join(RULE_PRESETS)}, got {rule.preset!r}"
            )
        validate_rule(rule.to_rule(), f"rules.{name}")
    known = [*RULE_PRESETS, *book.rules]
    for allowed in book.limits.allowed_rules or ():
        if allowed not in known:
            raise InvalidArgumentError(
                f"limits.allowed_rules: {allowed!r} is not a rule; choose from {', '.join(known)}"
            )
    if not book.names(""):
        raise InvalidArgumentError("limits: lossless_only excludes all of allowed_rules")
