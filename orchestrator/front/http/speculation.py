"""`speculation` in a body: the JSON form of the proto message of this name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from flyspec import rpc, wire
from flyspec.errors import InvalidArgumentError
from flyspec.rules import PARAMETERS, member_name
from flyspec.v1 import common_pb2, generation_pb2
from flyspec.validation import LENGTHS
from flyspec.values.requests import GenerateOptions, GenerationRequest


def options_with(speculation: Mapping[str, Any], context_length: int) -> GenerateOptions:
    """Return options with these for speculation. Raises `InvalidArgumentError`."""
    rpc.check_lists(
        speculation, LENGTHS, context_length, generation_pb2.Speculation.DESCRIPTOR, "speculation."
    )
    message = generation_pb2.GenerateRequest(text="x")
    given = _with_rule(speculation, "speculation")
    if isinstance(phases := given.get("phases"), list):
        given["phases"] = [
            _phase(phase, f"speculation.phases[{index}]") if isinstance(phase, Mapping) else phase
            for index, phase in enumerate(phases)
        ]
    try:
        json_format.ParseDict({"speculation": given}, message)
    except json_format.ParseError as error:
        # Each level says which field it failed to parse; what is wrong comes last.
        what = str(error).split("field: ")[-1].split(' at "')[0].splitlines()[0]
        raise InvalidArgumentError(
            f"speculation: {what}; it is the JSON form of the message Speculation in "
            "generation.proto"
        ) from None
    options = wire.decode(GenerationRequest, message).options
    if options.eager:
        raise InvalidArgumentError(
            "speculation.eager: not over HTTP, where sent text cannot be retracted"
        )
    return options


def _phase(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a phase as `ParseDict` takes it; one text may end it, like one `stop`."""
    phase = _with_rule(given, where)
    until = phase.get("until")
    return {**phase, "until": [until]} if isinstance(until, str) else phase


def _with_rule(given: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return an object with its `rule`, if any, as `ParseDict` takes it."""
    if not isinstance(rule := given.get("rule", {}), Mapping | None):
        raise InvalidArgumentError(
            f'{where}.rule: must be an object such as {{"name": "exact"}}, got {rule!r:.50}'
        )
    return {**given, **({"rule": _with_members(rule, where)} if rule else {})}


def _with_members(rule: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a rule with numbers for enum members that are named as in flags and files."""
    values = dict(rule)
    for field in common_pb2.Rule.DESCRIPTOR.fields:
        parameter = PARAMETERS.get(field.name)
        if parameter is None or not parameter.members:
            continue
        members = {member_name(member): int(member) for member in parameter.members}
        for key in {field.name, field.json_name} & rule.keys():
            value = rule[key]
            if value in [*members]:
                values[key] = members[value]
            elif isinstance(value, str) and not value.isupper():  # else the proto's name
                raise InvalidArgumentError(
                    f"{where}.rule.{field.name} must be one of {', '.join(members)}, got "
                    f"{value!r:.50}"
                )
    return values
