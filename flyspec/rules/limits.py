"""The operator's limits on how lossy requests may be: `[limits]` in a rules file.

A limit applies to one parameter, and so only to lossy rules that have it; `allowed_rules` and
`lossless_only` restrict the rules themselves. The parameter table defines which parameters can be
limited, and how: a minimum if smaller values accept more, else a maximum.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, create_model

from flyspec.errors import InvalidArgumentError
from flyspec.ranges import Range
from flyspec.rules import PARAMETERS, Parameter, Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import measure_of

N = TypeVar("N", int, float)


def _of_each(names: Iterable[str]) -> BeforeValidator:
    """Accept a number for all names, or a table of numbers by name."""

    def to_table(value: Any) -> Any:
        if isinstance(value, int | float) and not isinstance(value, bool):
            return dict.fromkeys(names, value)
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"must be a number, or a table of numbers for {', '.join(names)}")
        return value

    return BeforeValidator(to_table)


def _number(range_: Range) -> Any:
    kind = int if range_.integers else float
    return Annotated[kind, Field(ge=range_.low, le=range_.high)]


def _limit_type(parameter: Parameter) -> Any:
    """Return the type of a limit: a number in the widest range, or a table by measure name."""
    number = _number(max(parameter.ranges.values(), key=lambda range_: range_.high))
    if len(parameter.ranges) == 1:
        return number | None
    owners = [preset for preset in RULE_PRESETS.values() if parameter.name in preset.defaults]
    names = tuple(
        dict.fromkeys(p.limited_as + parameter.show(m) for p in owners for m in parameter.ranges)
    )
    table: Any = dict[Literal[names], number]  # type: ignore[valid-type]
    return Annotated[table | None, _of_each(names)]


class _Limits(BaseModel):
    """Limits on requests; None for no limit.

    Besides the fields here, there is one for each parameter that can be limited: its name prefixed
    with `min_` or `max_`. A parameter with several measures takes one number for all of them, or a
    table by measure, in which case measures not in the table are refused.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    allowed_rules: Annotated[list[str], Field(min_length=1)] | None = None
    lossless_only: bool = False
    require_loop_guard: bool = False
    max_num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None
    max_loose_tokens: Annotated[int, Field(ge=0)] | None = None
    max_loose_cost_nats: Annotated[float, Field(ge=0)] | None = None

    def of_parameter(self, parameter: Parameter, rule: Rule) -> float | None:
        """Return a parameter's limit for the measure that a resolved rule uses, if any."""
        limit = getattr(self, parameter.limit_name or "", None)
        if not isinstance(limit, Mapping):
            return limit
        measure = measure_of(rule, parameter)
        assert measure is not None
        assert parameter.measured_by is not None
        prefix = RULE_PRESETS[rule.name].limited_as
        if prefix + parameter.show(measure) not in limit:
            by = PARAMETERS[parameter.measured_by]
            allowed = [by.show(m) for m in parameter.ranges if prefix + by.show(m) in limit]
            raise InvalidArgumentError(
                f"rule.{by.name} must be one of {', '.join(allowed)} on this server, "
                f"got {by.show(measure)}"
                if allowed
                else f"rule.name: this server's limits allow no {by.name} for {rule.name!r}"
            )
        return float(limit[prefix + parameter.show(measure)])

    def check_rule(self, rule: Rule, given: Rule) -> None:
        """Refuse a resolved rule that exceeds a limit; `given` is the rule in the request."""
        for name, parameter in PARAMETERS.items():
            value = getattr(rule, name)
            if value is None or RULE_PRESETS[rule.name].lossless:
                continue
            limit = self.of_parameter(parameter, rule)
            if limit is None:
                continue
            least, amount = parameter.amount(limit), parameter.amount(value)
            if parameter.limit == "min" and amount < least:
                allowed = f"at least {limit:g}" if limit or not parameter.zero_is_all else "0"
            elif parameter.limit == "max" and amount > least:
                allowed = f"at most {limit:g}"
            else:
                continue
            if limit and parameter.zero_is_all:
                allowed += ", or 0,"
            own = "" if getattr(given, name) is not None else ", the rule's default; set another"
            raise InvalidArgumentError(
                f"rule.{name} must be {allowed} on this server, got {value:g}{own}"
            )

    def bound(self, name: str, given: N | None, where: str = "speculation.") -> N | None:
        """Return the request's budget of that name (default: the limit); refuse one above it.

        `where` is prefixed to the name in errors.
        """
        limit: N | None = getattr(self, name)
        if given is None or limit is None:
            return limit if given is None else given
        if given > limit:
            raise InvalidArgumentError(
                f"{where}{name} must be between 0 and {limit:g} on this server, got {given:g}"
            )
        return given

    def check_loop_guard(self, disabled: bool) -> None:
        if disabled and self.require_loop_guard:
            raise InvalidArgumentError(
                "speculation.disable_loop_guard must be false on this server, got true"
            )


if TYPE_CHECKING:
    Limits = _Limits
else:
    Limits = create_model(
        "Limits",
        __base__=_Limits,
        __doc__=_Limits.__doc__,
        **{p.limit_name: (_limit_type(p), None) for p in PARAMETERS.values() if p.limit},
    )
