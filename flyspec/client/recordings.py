"""Recordings of generations: files of JSON lines, each with all that judging it again needs.

A line is the JSON form of the proto message `GenerationRecording`, which documents its fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf import json_format

from flyspec import wire
from flyspec.errors import ConfigError, InvalidArgumentError
from flyspec.rules.resolve import validate_rule
from flyspec.v1 import generation_pb2
from flyspec.validation import common_distribution_spec, validate_sampling
from flyspec.values.generation import RECORDING_VERSION, Chunk, Generation, Recording, RoundRecord
from flyspec.values.requests import GenerateOptions
from flyspec.values.tokens import Origin

_PARTS = ("started", "output", "completion")
_WITHIN = re.compile(r"Failed to parse (\w+) field")
_AT = re.compile(r' at "?GenerationRecording\.?([\w.\[\]]*)"?')


class RecordedLine(NamedTuple):
    """A recording and where it is: FILE:LINE."""

    where: str
    recording: Recording


def recordable(options: GenerateOptions) -> GenerateOptions:
    """Return options with which `recording_of` has what an audit needs.

    Rounds and, where the rule compares them, draft distributions. And each token's log-probability,
    by which a target with slightly different weights is told even where no token is different.
    """
    return replace(
        options,
        return_rounds=True,
        return_draft_distributions=True,
        logprobs=options.logprobs or 0,
    )


def recording_of(generation: Generation) -> Recording:
    """Return the recording of a generation that was made with `recordable` options.

    Raises `InvalidArgumentError` if it was made without `return_rounds`.
    """
    started = generation.started
    if generation.token_ids and not generation.rounds:
        raise InvalidArgumentError("return_rounds: must be set for a generation to be recorded")
    spec = common_distribution_spec(started.rules_by_index, started.sampling)
    if spec and any(r.draft_token_ids and not r.draft_distributions for r in generation.rounds):
        raise InvalidArgumentError(
            "return_draft_distributions: must be set for a generation by "
            f"{started.rules} to be recorded"
        )
    output = Chunk(
        text=generation.text,
        token_ids=generation.token_ids,
        origins=generation.origins,
        num_final_tokens=len(generation.token_ids),
        loose_gaps_nats=generation.loose_gaps_nats,
        # The tokens are known, and their bytes would be a third of the recording.
        logprobs=[entry._replace(token=b"", top_tokens=()) for entry in generation.logprobs],
    )
    return Recording(started, output, generation.completion, generation.rounds)


def as_document(recording: Recording) -> dict[str, Any]:
    """Return a recording as a document, the JSON form of its message."""
    message = wire.encode(recording)
    document: dict[str, Any] = json_format.MessageToDict(message, preserving_proto_field_name=True)
    return document


def to_line(recording: Recording) -> str:
    """Return a recording as a line of JSON, without the line break."""
    return json.dumps(as_document(recording), ensure_ascii=False, separators=(",", ":"))


def read_recordings(path: str | Path) -> Iterator[RecordedLine]:
    """Yield the recordings in a file. Raises `ConfigError` that names the line and the field."""
    try:
        with Path(path).open(encoding="utf-8") as file:
            found = 0
            for number, line in enumerate(file, 1):
                if line.strip():
                    found += 1
                    where = f"{path}:{number}"
                    yield RecordedLine(where, from_line(line, where))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not found:
        raise ConfigError(f"{path}: has no recordings; make some with generate --record")


def from_line(line: str, where: str = "recording") -> Recording:
    """Return the recording in a line. Raises `ConfigError` that names the field."""
    try:
        document = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from None
    if not isinstance(document, dict) or "format_version" not in document:
        raise ConfigError(
            f"{where}: is not a recording, which is an object with format_version; "
            "make one with generate --record"
        )
    if document["format_version"] != RECORDING_VERSION:
        raise ConfigError(
            f"{where}: format_version is {document['format_version']!r:.20}, but this flyspec "
            f"reads {RECORDING_VERSION}; use the flyspec that made the recording, or a newer one"
        )
    if missing := [part for part in _PARTS if part not in document]:
        raise ConfigError(f"{where}: {missing[0]}: is missing")
    message = generation_pb2.GenerationRecording()
    try:
        json_format.ParseDict(document, message)
    except json_format.ParseError as error:
        raise ConfigError(f"{where}: {_readable(error)}") from None
    try:
        recording: Recording = wire.decode(Recording, message)
        for rule in recording.started.rules_by_index:
            validate_rule(rule)
        validate_sampling(recording.started.sampling)
        _check(recording)
    except InvalidArgumentError as error:
        raise ConfigError(f"{where}: {error}") from None
    return recording


def _readable(error: json_format.ParseError) -> str:
    """Return a parser's complaint as `field: what is wrong`."""
    text = str(error)
    place = _AT.search(text)
    what = _AT.sub("", text).split(" field: ")[-1].splitlines()[0].rstrip(". ")
    if place and place[1]:
        name = re.sub("[A-Z]", lambda m: "_" + m[0].lower(), place[1].rstrip("."))
    else:
        name = ".".join(_WITHIN.findall(text))
    return f"{name}: {what}" if name else what


def _check(recording: Recording) -> None:
    """Check what parsing does not. Raises `InvalidArgumentError`."""
    started, output = recording.started, recording.output
    if not started.prompt_token_ids:
        raise InvalidArgumentError("started.prompt_token_ids: is empty")
    if started.max_tokens < 1:
        raise InvalidArgumentError("started.max_tokens: is missing")
    count = len(output.token_ids)
    loose = sum(origin is Origin.LOOSE for origin in output.origins)
    for name, found, wanted in (
        ("origins", output.origins, (count,)),
        ("logprobs", output.logprobs, (0, count)),
        ("loose_gaps_nats", output.loose_gaps_nats, (loose,)),
    ):
        if len(found) not in wanted:
            raise InvalidArgumentError(
                f"output.{name}: has {len(found)} entries, where {wanted[-1]} are needed"
            )
    for index, round_ in enumerate(recording.rounds):
        _check_round(f"rounds[{index}]", round_)


def _check_round(name: str, round_: RoundRecord) -> None:
    count = len(round_.draft_token_ids)
    for part, found, wanted in (
        ("decisions", round_.decisions, (count,)),
        ("draft_origins", round_.draft_origins, (count,)),
        ("draft_distributions", round_.draft_distributions, (0, count)),
    ):
        if len(found) not in wanted:
            raise InvalidArgumentError(
                f"{name}.{part}: has {len(found)} entries for {count} draft_token_ids"
            )
    if count and round_.plain_token_ids:
        raise InvalidArgumentError(f"{name}.plain_token_ids: not in a round with drafts")
