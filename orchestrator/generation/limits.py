"""How lossy the operator lets requests be: `[limits]` of a rules file.

A limit speaks of one parameter, and so only of the rules that have it; `allowed_rules` and
`lossless_only` say which rules there are. All directions are those of loss: a floor where a smaller
value accepts more (entropy threshold, window, typical acceptance), a ceiling elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from flyspec.errors import InvalidArgumentError
from flyspec.rules import Divergence, EntropyMeasure, Rule
from flyspec.validation import (
    MAX_ENTROPY_TOP_K,
    MAX_THRESHOLD_NATS,
    MAX_WINDOW_SIZE,
    MIN_ENTROPY_TOP_K,
    RULE_PARAMETERS,
)

N = TypeVar("N", int, float)


def enum_name(member: IntEnum) -> str:
    """How a member is written in files and messages."""
    return member.name.lower()


def _of_each(members: Iterable[IntEnum]) -> BeforeValidator:
    """Takes a number for all members, or a table of numbers by member."""
    names = [enum_name(m) for m in members]

    def to_table(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return dict.fromkeys(names, value)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"must be a number, or a table of numbers for {', '.join(names)}")
        return value

    return BeforeValidator(to_table)


_Nats = Annotated[float, Field(ge=0, le=MAX_THRESHOLD_NATS)]
_Share = Annotated[float, Field(ge=0, le=1)]
_MeasureName = Literal["normalized", "top_k"]
_DivergenceName = Literal["js", "kl", "tv"]


class Limits(BaseModel):
    """What requests may ask for at most; None is without limit.

    `min_fly_entropy_threshold` and `max_divergence_threshold` take a number for every measure, or a
    table by measure; then the measures that the table does not name are refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    allowed_rules: Annotated[list[str], Field(min_length=1)] | None = None
    lossless_only: bool = False
    require_loop_guard: bool = False
    max_num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    max_loose_tokens: Annotated[int, Field(ge=0)] | None = None
    max_loose_cost_nats: Annotated[float, Field(ge=0)] | None = None
    min_fly_window_size: Annotated[int, Field(ge=0, le=MAX_WINDOW_SIZE)] | None = None
    min_fly_entropy_threshold: Annotated[
        dict[_MeasureName, _Nats] | None, _of_each(EntropyMeasure)
    ] = None
    max_fly_entropy_top_k: (
        Annotated[int, Field(ge=MIN_ENTROPY_TOP_K, le=MAX_ENTROPY_TOP_K)] | None
    ) = None
    max_margin_threshold: _Nats | None = None
    max_divergence_threshold: Annotated[
        dict[_DivergenceName, _Nats] | None, _of_each(Divergence)
    ] = None
    min_typical_epsilon: _Share | None = None
    min_typical_delta: _Nats | None = None
    max_random_acceptance: _Share | None = None

    def check_rule(self, rule: Rule, given: Rule) -> None:
        """Refuse a resolved rule that is beyond a limit; `given` is what the request said of it."""
        for name in RULE_PARAMETERS:
            value = getattr(rule, name)
            floor, ceiling = self._limit("min", name, rule), self._limit("max", name, rule)
            if floor is not None and value is not None and value < floor:
                allowed = f"at least {floor:g}"
            elif ceiling is not None and value is not None and value > ceiling:
                allowed = f"at most {ceiling:g}"
            else:
                continue
            own = "" if getattr(given, name) is not None else ", the rule's own; give another"
            raise InvalidArgumentError(
                f"rule.{name} must be {allowed} on this server, got {value:g}{own}"
            )

    def bound_loose_tokens(self, given: int | None) -> int | None:
        """The request's budget: the limit if none was given; beyond it is refused."""
        return _bound("max_loose_tokens", given, self.max_loose_tokens)

    def bound_loose_cost_nats(self, given: float | None) -> float | None:
        """The request's budget: the limit if none was given; beyond it is refused."""
        return _bound("max_loose_cost_nats", given, self.max_loose_cost_nats)

    def check_loop_guard(self, disabled: bool) -> None:
        """Refuse a request without the loop guard where it is required."""
        if disabled and self.require_loop_guard:
            raise InvalidArgumentError(
                "speculation.disable_loop_guard must be false on this server, got true"
            )

    def _limit(self, side: str, name: str, rule: Rule) -> float | None:
        """The limit to a parameter, for the measure that the rule uses."""
        limit = getattr(self, f"{side}_{name}", None)
        if not isinstance(limit, Mapping):
            return limit
        field = "divergence" if name.startswith("divergence") else "entropy_measure"
        measure = getattr(rule, field)
        if measure is None:  # the rule has no such parameter
            return None
        if enum_name(measure) not in limit:
            raise InvalidArgumentError(
                f"rule.{field} must be one of {', '.join(limit)} on this server, "
                f"got {enum_name(measure)}"
            )
        return float(limit[enum_name(measure)])


def _bound(name: str, given: N | None, limit: N | None) -> N | None:
    if limit is None or given is None:
        return limit if given is None else given
    if given > limit:
        raise InvalidArgumentError(
            f"speculation.{name} must be between 0 and {limit:g} on this server, got {given:g}"
        )
    return given
