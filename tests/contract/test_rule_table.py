"""Protos, flags, files, limits, benches and docs have exactly the rules of the table."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from docs.rule_tables import write_tables
from flyspec import wire
from flyspec.cli.options.binding import fields_of, take
from flyspec.rule_files import NamedRule
from flyspec.rules import PARAMETERS, Parameter, Rule
from flyspec.rules.limits import Limits
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule, validate_rule
from flyspec.v1 import common_pb2
from flyspec.values.rounds import VerifyOpen
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.conditions import parse_conditions
from tests.autojudges import random_judge
from verify_service.rules.presets import compose

ROOT = Path(__file__).resolve().parents[2]
PROTO_KINDS = {
    int: FieldDescriptor.CPPTYPE_UINT32,
    float: FieldDescriptor.CPPTYPE_DOUBLE,
    bool: FieldDescriptor.CPPTYPE_BOOL,
}


def a_value(parameter: Parameter) -> Any:
    """One in range, other than 0."""
    if parameter.members:
        return max(parameter.members)
    return parameter.kind(next(iter(parameter.ranges.values())).high if parameter.ranges else 1)


def owner(parameter: Parameter) -> str:
    return next(name for name, p in RULE_PRESETS.items() if parameter.name in p.defaults)


def test_the_proto_has_the_fields_of_the_table() -> None:
    fields = {f.name: f for f in common_pb2.Rule.DESCRIPTOR.fields}
    assert set(fields) == {f.name for f in dataclasses.fields(Rule)}
    assert set(fields) == {"name", "guarded_token_ids", *PARAMETERS}
    for name, parameter in PARAMETERS.items():
        field = fields[name]
        if parameter.members:
            prefix = field.enum_type.values[0].name.removesuffix("UNSPECIFIED")
            ours = {prefix + m.name: int(m) for m in parameter.members}
            assert {v.name: v.number for v in field.enum_type.values if v.number} == ours
        else:
            assert field.has_presence
            assert field.cpp_type == PROTO_KINDS[parameter.kind]


@pytest.mark.parametrize("parameter", PARAMETERS.values(), ids=lambda p: p.name)
def test_a_parameter_reaches_everything_by_its_name(parameter: Parameter) -> None:
    value, name = a_value(parameter), owner(parameter)
    rule = Rule(name, **{parameter.name: value})
    validate_rule(rule)
    opening = VerifyOpen((), 0, rule, SamplingParams(), 0)
    assert wire.unwrap(wire.encode(opening)).rule == rule
    shown = parameter.show(value)
    assert parameter.read(shown) == value
    given = {field.parameter: None for field in fields_of(Rule).values()}
    given |= {"rule": name, parameter.name: shown if parameter.members else value}
    assert take(Rule(""), given) == rule
    (condition,) = parse_conditions(f"{name}:{parameter.name}={shown}")
    assert condition.rule == rule
    in_file = shown if parameter.members else value
    assert NamedRule(preset=name, **{parameter.name: in_file}).to_rule() == rule
    assert compose(resolve_rule(rule), random_judge(1))


def test_every_parameter_can_be_limited_on_its_side_and_no_other() -> None:
    limits = {p.limit_name for p in PARAMETERS.values()} - {None}
    assert set(Limits.model_fields) - limits == {
        "allowed_rules", "lossless_only", "require_loop_guard", "max_num_speculative_tokens",
        "max_loose_tokens", "max_loose_cost_nats",
    }  # fmt: skip


def test_what_loses_something_can_be_limited() -> None:
    """Every number makes a rule more or less lossy, and so has a limit."""
    assert all(bool(p.limit) == bool(p.ranges) for p in PARAMETERS.values())


@pytest.mark.parametrize("name", RULE_PRESETS)
def test_presets_are_within_the_table(name: str) -> None:
    resolved = resolve_rule(Rule(name))
    validate_rule(resolved)
    assert resolve_rule(resolved) == resolved
    assert RULE_PRESETS[name].defaults.keys() <= PARAMETERS.keys()


def test_the_tables_of_the_documentation_are_the_tables() -> None:
    document = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
    assert write_tables(document) == document, "run `python -m docs.rule_tables docs/rules.md`"
    for name in RULE_PRESETS:
        assert f"| `{name}` |" in document
        assert f"### {name}" in document or name.startswith("fly-")
    for parameter in PARAMETERS.values():
        assert f"| `{parameter.name}`" in document


def test_no_rule_is_known_by_its_name_elsewhere() -> None:
    """Only the tables may depend on a rule's name; other code uses its properties."""
    for folder in ("flyspec", "orchestrator", "verify_service", "draft_service", "bench"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            assert "rule.name ==" not in text, path
            assert "rule.name in (" not in text, path
