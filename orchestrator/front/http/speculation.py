"""`speculation` in a body: the JSON form of the proto message of this name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from google.protobuf import json_format

from flyspec import wire
from flyspec.errors import InvalidArgumentError
from flyspec.v1 import generation_pb2
from flyspec.values.requests import GenerateOptions, GenerationRequest


def options_with(speculation: Mapping[str, Any]) -> GenerateOptions:
    """Return options with these for speculation. Raises `InvalidArgumentError`."""
    message = generation_pb2.GenerateRequest(text="x")
    if not isinstance(rule := speculation.get("rule", {}), Mapping | None):
        raise InvalidArgumentError(
            f'speculation.rule: must be an object such as {{"name": "exact"}}, got {rule!r:.50}'
        )
    try:
        json_format.ParseDict({"speculation": speculation}, message)
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
