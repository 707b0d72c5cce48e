"""The acceptance rules' parameters, each declared once as a field of `Rule`.

Flags, rules files, limits, checks, warnings, bench conditions and the tables of docs/rules.md are
derived from here and from `presets`, which declares the rules. The proto message `Rule` has fields
of the same names. No I/O, no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType, NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from flyspec.ranges import Range

MAX_GUARDED_TOKENS = 1024
MAX_WINDOW_SIZE = 1024
MAX_DIVERGENCE_TOP_K = 1024
MAX_RELAXED_TOP_K = 1024


class EntropyMeasure(IntEnum):
    """Measure of the target's uncertainty; values differ by an order of magnitude."""

    NORMALIZED = 1
    TOP_K = 2


class WindowScope(IntEnum):
    """Which positions a window may cover."""

    WITHIN_ROUND = 1
    ACROSS_ROUNDS = 2


class Divergence(IntEnum):
    """Divergence of the target's distribution p and the draft's q."""

    JS = 1
    KL = 2
    TV = 3


def member_name(member: IntEnum) -> str:
    """Return an enum member's name in flags, files and messages."""
    return member.name.lower()


@dataclass(frozen=True, slots=True)
class Parameter:
    """Declaration of a parameter, except for its values in presets.

    `kind` is int, float, bool or an enum; `symbol` is used in docs/rules.md. A number has one range
    (under None), or one per measure that it applies to; `measured_by` then names the parameter that
    selects the measure, and a preset's value only applies to its own measure. `limit` is how an
    operator can bound it: "min" if lower values accept more, "max" if higher ones do.
    `zero_is_all`: 0 means more than any number. `unset` says what a preset's value of None stands
    for. Values above `unwise_above` cause a warning that
    ends in `unwise`.
    """

    help: str
    symbol: str = ""
    ranges: Mapping[IntEnum | None, Range] = dataclasses.field(default_factory=dict)
    unit: str = ""
    measured_by: str | None = None
    limit: str | None = None
    zero_is_all: bool = False
    unset: str = ""
    unwise_above: float = math.inf
    unwise: str = ""
    name: str = ""
    kind: type = float

    @property
    def limit_name(self) -> str | None:
        """The key of its limit in a rules file, or None."""
        return f"{self.limit}_{self.name}" if self.limit else None

    def amount(self, value: float) -> float:
        """Return the value that a limit is compared with."""
        return math.inf if self.zero_is_all and value == 0 else value

    @property
    def members(self) -> type[IntEnum] | None:
        """The enum of its values, or None."""
        return self.kind if issubclass(self.kind, IntEnum) else None

    def show(self, value: Any) -> str:
        """Format a value for flags, files and messages."""
        if isinstance(value, bool):
            return str(value).lower()
        return member_name(value) if isinstance(value, IntEnum) else f"{value:g}"

    def read(self, text: str) -> Any:
        """Parse a value as formatted by `show`. Raises `ValueError` naming what is expected."""
        known: dict[str, Any] = {"true": True, "false": False} if self.kind is bool else {}
        known |= {member_name(m): m for m in self.members or ()}
        if known and text not in known:
            raise ValueError(f"one of {', '.join(known)}")
        if self.kind is int and not text.isdecimal():
            raise ValueError("an integer, 0 or more")
        try:
            return known[text] if known else self.kind(text)
        except ValueError:
            raise ValueError("a number") from None


def _parameter(
    symbol: str, help: str, ranges: Range | Mapping[IntEnum, Range] | None = None, **known: Any
) -> Parameter:
    by_measure: Mapping[Any, Range] = ranges if isinstance(ranges, Mapping) else {}
    if isinstance(ranges, Range):
        by_measure = {None: ranges}
    return Parameter(help, symbol, by_measure, **known)


_ENTROPY_RANGES = {
    EntropyMeasure.NORMALIZED: Range(0.0, 1.0, " for the normalized measure"),
    EntropyMeasure.TOP_K: Range(0.0, 20.0, " for the top_k measure, in nats"),
}


# fmt: off
@dataclass(frozen=True, slots=True)
class Rule:
    """An acceptance rule by preset name, with the parameters that differ from the preset.

    `None` takes the preset's value; `flyspec.rules.resolve.resolve_rule` fills them in.
    """

    name: str
    fly_window_size: Annotated[int | None, _parameter(
        "W", "matches required after a loosely accepted token; 0: no window",
        Range(0, MAX_WINDOW_SIZE), limit="min", unset="min(6, K − 1)",
    )] = None
    fly_entropy_threshold: Annotated[float | None, _parameter(
        "θ", "minimum entropy of the target for accepting a mismatch",
        _ENTROPY_RANGES, measured_by="entropy_measure", limit="min",
    )] = None
    fly_entropy_top_k: Annotated[int | None, _parameter(
        "k", "number of most likely tokens in the top_k entropy",
        {EntropyMeasure.TOP_K: Range(2, 1024)}, measured_by="entropy_measure", limit="max",
    )] = None
    entropy_measure: Annotated[EntropyMeasure | None, _parameter(
        "", "normalized (entropy divided by log|V|) or top_k (of the k most likely tokens, nats)",
    )] = None
    window_scope: Annotated[WindowScope | None, _parameter(
        "", "where those matches may be: within_round, or across_rounds (the token is held back "
        "until then)",
    )] = None
    margin_threshold: Annotated[float | None, _parameter(
        "τ", "maximum nats by which the target may prefer its own token",
        Range(0.0, 100.0), unit="nats", limit="max", unwise_above=0.3,
        unwise="text may start to loop (0.44 % of texts at 0.4, as measured by llama.cpp)",
    )] = None
    divergence: Annotated[Divergence | None, _parameter(
        "", "divergence of target and draft distributions: js, kl or tv",
    )] = None
    divergence_threshold: Annotated[float | None, _parameter(
        "T", "maximum divergence for accepting a mismatch",
        dict.fromkeys(Divergence, Range(0.0, 100.0)), measured_by="divergence", limit="max",
    )] = None
    divergence_top_k: Annotated[int | None, _parameter(
        "", "number of most likely tokens to compare, with the rest lumped together (rejection: to "
        "draft from); 0: the whole vocabulary",
        Range(0, MAX_DIVERGENCE_TOP_K), limit="min", zero_is_all=True,
    )] = None
    typical_epsilon: Annotated[float | None, _parameter(
        "ε", "accept tokens above this target probability", Range(0.0, 1.0), limit="min",
    )] = None
    typical_delta: Annotated[float | None, _parameter(
        "δ", "accept tokens above δ·exp(-entropy) where that is below ε",
        Range(0.0, 100.0), limit="min",
    )] = None
    relaxed_top_k: Annotated[int | None, _parameter(
        "k", "accept only tokens among the target's k most likely",
        Range(1, MAX_RELAXED_TOP_K), limit="max",
    )] = None
    relaxed_delta: Annotated[float | None, _parameter(
        "δ", "accept tokens whose probability is at most this below that of the most likely token",
        Range(0.0, 1.0), limit="max",
    )] = None
    relaxed_ratio: Annotated[float | None, _parameter(
        "r", "accept tokens with at least this share of the most likely token's probability, too; "
        "1: the difference alone decides",
        Range(0.0, 1.0), limit="min",
    )] = None
    confidence_threshold: Annotated[float | None, _parameter(
        "c", "judge exactly where the target's most likely token has more than this probability",
        Range(0.0, 1.0), limit="max",
    )] = None
    mars_ratio: Annotated[float | None, _parameter(
        "θ", "accept the runner-up if its raw logit is more than this share of the largest one",
        Range(0.0, 1.0), limit="min",
    )] = None
    ensemble_weight: Annotated[float | None, _parameter(
        "w", "weight of the target in the mixture with the draft's distribution; 1: the target "
        "alone",
        Range(0.0, 1.0), limit="min",
    )] = None
    cactus_delta: Annotated[float | None, _parameter(
        "δ", "divergence that a drafted token's raised probability may cost, nats",
        Range(0.0, 100.0), unit="nats", limit="max",
    )] = None
    judge_threshold: Annotated[float | None, _parameter(
        "t", "maximum probability, by the judge, that a mismatch changes the answer",
        Range(0.0, 1.0), limit="max", unset="the judge's own",
    )] = None
    random_acceptance: Annotated[float | None, _parameter(
        "r", "probability of accepting a mismatch", Range(0.0, 1.0), limit="max",
    )] = None
    random_judges_matches: Annotated[bool | None, _parameter(
        "", "apply the probability to matches too, as the released control does; a rejected match "
        "ends the round and is replaced by the same token",
    )] = None
    guarded_token_ids: tuple[int, ...] = ()
    # fmt: on

    def document(self) -> dict[str, Any]:
        """Return its name and the parameters that it has, for JSON; members of enums by name."""
        given = {n: v for n, v in dataclasses.asdict(self).items() if v is not None and v != ()}
        return {n: member_name(v) if isinstance(v, IntEnum) else v for n, v in given.items()}


def _declared() -> Mapping[str, Parameter]:
    found = {}
    for name, hint in get_type_hints(Rule, include_extras=True).items():
        if get_origin(hint) is Annotated:
            optional, declared = get_args(hint)
            (kind,) = set(get_args(optional)) - {NoneType}
            found[name] = dataclasses.replace(declared, name=name, kind=kind)
    return MappingProxyType(found)


PARAMETERS = _declared()
"""The parameters of rules by name, except `guarded_token_ids`."""
