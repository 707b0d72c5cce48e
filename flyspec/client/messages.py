"""A request's metadata, and errors for values that protobuf fields cannot hold."""

from __future__ import annotations

from flyspec.errors import InvalidArgumentError
from flyspec.flags import UINT32, flags_of
from flyspec.metadata import REQUEST_ID_KEY, TRACEPARENT_KEY, is_request_id, is_traceparent
from flyspec.rules import PARAMETERS, Rule
from flyspec.values.chat import Chat
from flyspec.values.generation import GenerateOptions, Prompt


def metadata_of(options: GenerateOptions) -> tuple[tuple[str, str], ...]:
    """Return the request's metadata. Raises `InvalidArgumentError`."""
    found = []
    if options.request_id:
        if not is_request_id(options.request_id):
            raise InvalidArgumentError(
                f"request_id must be 1 to 128 letters, digits and ._:@/+=-, got "
                f"{options.request_id[:200]!r}"
            )
        found.append((REQUEST_ID_KEY, options.request_id))
    if options.traceparent:
        if not is_traceparent(options.traceparent):
            raise InvalidArgumentError(
                "traceparent must be VERSION-TRACE-SPAN-FLAGS with 2, 32, 16 and 2 digits in "
                f"lower-case hex (W3C Trace Context), got {options.traceparent[:200]!r}"
            )
        found.append((TRACEPARENT_KEY, options.traceparent))
    return tuple(found)


def misfit(prompt: Prompt, options: GenerateOptions) -> str | None:
    """Describe the first integer of a request that its field cannot hold; None if all fit."""
    sampling, rule = options.sampling, options.rule or Rule("")
    for name, token_ids in (
        ("prompt", () if isinstance(prompt, str | Chat) else prompt),
        ("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("rule.guarded_token_ids", rule.guarded_token_ids),
    ):
        for token_id in token_ids:
            if isinstance(token_id, int) and token_id not in UINT32:
                return f"{name}: token id {token_id} is out of range; ids are 0 to {UINT32.high}"
    ranges = [
        (f"rule.{name}", getattr(rule, name), range_)
        for name, parameter in PARAMETERS.items()
        for range_ in parameter.ranges.values()
    ]
    for holder, message in ((sampling, "sampling."), (options, "")):
        for name, (_, flag) in flags_of(type(holder)).items():
            within = "speculation." if flag.group == "Speculation" else message
            if flag.range is not None:
                ranges.append((within + name, getattr(holder, name), flag.range))
    for name, value, range_ in ranges:  # other types are checked by protobuf
        if range_.integers and type(value) is int and value not in range_:
            return f"{name} must be an integer between {range_.low} and {range_.high}, got {value}"
    return None
