"""Validates a request's phases and resolves their rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from flyspec.errors import InvalidArgumentError
from flyspec.rule_files import RuleBook
from flyspec.rules import Rule
from flyspec.rules.limits import Limits
from flyspec.rules.presets import RULE_PRESETS
from flyspec.spelling import did_you_mean
from flyspec.validation import MAX_STOP_STRINGS
from flyspec.values.admin import ModelInfo, VerifyServiceInfo
from flyspec.values.phases import EXACT_INSIDE, MAX_PHASES, Phase
from flyspec.values.requests import GenerateOptions
from flyspec.values.rounds import MAX_STOP_TOKEN_IDS
from orchestrator.generation.prompt import check_ids

MAX_STOP_CHARACTERS = 1024
EXACT = Rule("exact")


class RulesAsked:
    """The rules that a request asks for, resolved within the operator's limits.

    `default` is the one for phases that name none; W may depend on the requested K.
    """

    def __init__(
        self, book: RuleBook, default: Rule, num_speculative_tokens: int, target: VerifyServiceInfo
    ) -> None:
        self._book, self.default, self._k = book, default, num_speculative_tokens
        self._target = target
        self._resolved: list[tuple[str, Rule, Rule]] = []

    @property
    def limits(self) -> Limits:
        return self._book.limits

    def resolve(self, given: Rule, where: str = "") -> Rule:
        """Return a rule as resolved; `where` begins messages about it. Raises as `RuleBook`."""
        target = self._target
        try:
            rule = self._book.resolve(given, self._k, target.judge)
            if target.judge is None and RULE_PRESETS[rule.name].hidden_layers:
                raise InvalidArgumentError(
                    f"rule.name: {rule.name!r} needs a judge, and the target {target.model.name} "
                    "has none; start its verify service with --autojudge-file, or use another rule"
                )
        except InvalidArgumentError as error:
            raise InvalidArgumentError(f"{where}{error}") from None
        self._resolved.append((where, given, rule))
        return rule

    @property
    def judge_fingerprint(self) -> str:
        """The fingerprint of the judge that the resolved rules need; empty if none does."""
        judge = self._target.judge
        needed = any(RULE_PRESETS[rule.name].hidden_layers for _, _, rule in self._resolved)
        return judge.fingerprint if judge and needed else ""

    def check_guarded(self, model: ModelInfo) -> None:
        """Raise `InvalidArgumentError` if a rule guards tokens that the target does not have."""
        for where, _, rule in self._resolved:
            check_ids(f"{where}rule.guarded_token_ids", rule.guarded_token_ids, model)

    def warnings(self, num_speculative_tokens: int) -> list[str]:
        """Return warnings about the resolved rules for this K."""
        return [
            where + warning
            for where, given, rule in self._resolved
            for warning in self._book.warnings(given, rule, num_speculative_tokens)
        ]


def plan_phases(
    options: GenerateOptions, asked: RulesAsked, target: VerifyServiceInfo
) -> tuple[Phase, ...]:
    """Return the phases with resolved rules; none if there are none.

    Raises `InvalidArgumentError`.
    """
    given = options.phases
    if len(given) > MAX_PHASES:
        raise InvalidArgumentError(
            f"speculation.phases: at most {MAX_PHASES} allowed, got {len(given)}"
        )
    return tuple(
        _phase(phase, f"speculation.phases[{index}].", index == len(given) - 1, asked, target)
        for index, phase in enumerate(given)
    )


def _phase(
    phase: Phase, where: str, last: bool, asked: RulesAsked, target: VerifyServiceInfo
) -> Phase:
    check_texts(f"{where}until", phase.until)
    check_tokens(f"{where}until_token_ids", phase.until_token_ids, target.model)
    if last and phase.ends:
        raise InvalidArgumentError(
            f"{where}until: the last phase has no end; leave out until and until_token_ids, or add "
            "the phase that follows"
        )
    if not last and not phase.ends:
        raise InvalidArgumentError(
            f"{where}until: give a text or until_token_ids, since another phase follows"
        )
    check_cost(f"{where}max_loose_cost_nats", phase.max_loose_cost_nats)
    rule = phase.rule or asked.default
    if not rule.name:
        rule = replace(rule, name=asked.default.name)
    limits = asked.limits
    for name in ("max_loose_tokens", "max_loose_cost_nats"):
        limits.bound(name, getattr(phase, name), where)
    return replace(
        phase,
        rule=asked.resolve(rule, where),
        until=tuple(phase.until),
        until_token_ids=tuple(phase.until_token_ids),
    )


def check_exact_inside(given: Sequence[str]) -> tuple[str, ...]:
    """Return what is exact in any phase, each once. Raises `InvalidArgumentError`."""
    for name in given:
        if name not in EXACT_INSIDE:
            raise InvalidArgumentError(
                f"speculation.exact_inside must be one of {', '.join(EXACT_INSIDE)}, got "
                f"{name!r:.100}{did_you_mean(name, EXACT_INSIDE)}"
            )
    return tuple(name for name in EXACT_INSIDE if name in given)


def check_number_of_rules(count: int, target: VerifyServiceInfo) -> None:
    """Raise `InvalidArgumentError` if the target's service cannot switch among so many rules."""
    most = max(1, target.max_rules)
    if count > most:
        raise InvalidArgumentError(
            f"speculation.phases: need {count} rules, but the verify service can use {most} in a "
            "generation; update it, or use fewer phases"
        )


def check_cost(name: str, cost_nats: float | None) -> None:
    """Raise `InvalidArgumentError` for a budget that is no cost."""
    if cost_nats is not None and not 0 <= cost_nats < math.inf:  # NaN too
        raise InvalidArgumentError(f"{name} must be finite and at least 0, got {cost_nats:g}")


def check_texts(name: str, texts: Sequence[str]) -> None:
    """Raise `InvalidArgumentError` for texts that cannot be looked for in the output."""
    if len(texts) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(
            f"{name}: at most {MAX_STOP_STRINGS} strings allowed, got {len(texts)}"
        )
    for text in texts:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise InvalidArgumentError(
                f"{name}: each string must have 1 to {MAX_STOP_CHARACTERS} characters, "
                f"got {len(text)}"
            )


def check_tokens(name: str, token_ids: Sequence[int], model: ModelInfo) -> None:
    """Raise `InvalidArgumentError` for tokens that cannot be looked for in the output."""
    if len(token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidArgumentError(
            f"{name}: at most {MAX_STOP_TOKEN_IDS} tokens allowed, got {len(token_ids)}"
        )
    check_ids(name, token_ids, model)
