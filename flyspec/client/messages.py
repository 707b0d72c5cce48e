"""What of a request is not in its message: its metadata, and what a field cannot hold."""

from __future__ import annotations

from flyspec.errors import InvalidArgumentError
from flyspec.metadata import REQUEST_ID_KEY, TRACEPARENT_KEY, is_request_id, is_traceparent
from flyspec.rules import PARAMETERS, Rule
from flyspec.validation import MAX_TOP_K, MAX_TOP_LOGPROBS
from flyspec.values.generation import Chat, GenerateOptions, Prompt

_UINT32, _UINT64 = 2**32 - 1, 2**64 - 1


def metadata_of(options: GenerateOptions) -> tuple[tuple[str, str], ...]:
    """What goes beside the request. Raises `InvalidArgumentError`."""
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
    """The first integer of a request that its field cannot hold, in words; None if all fit."""
    sampling, rule = options.sampling, options.rule or Rule("")
    for name, token_ids in (
        ("prompt", () if isinstance(prompt, str | Chat) else prompt),
        ("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
        ("rule.guarded_token_ids", rule.guarded_token_ids),
    ):
        for token_id in token_ids:
            if not _fits(token_id, 0, _UINT32):
                return f"{name}: token id {token_id} is out of range; ids are 0 to {_UINT32}"
    for name, value, low, high in (
        ("seed", options.seed, 0, _UINT64),
        ("max_tokens", options.max_tokens, 1, _UINT32),
        ("logprobs", options.logprobs, 0, MAX_TOP_LOGPROBS),
        ("sampling.top_k", sampling.top_k, 0, MAX_TOP_K),
        ("sampling.min_tokens", sampling.min_tokens, 0, _UINT32),
        ("speculation.num_speculative_tokens", options.num_speculative_tokens, 0, _UINT32),
        ("speculation.max_loose_tokens", options.max_loose_tokens, 0, _UINT32),
        ("speculation.exact_prefix_tokens", options.exact_prefix_tokens, 0, _UINT32),
        *(
            (f"rule.{name}", getattr(rule, name), range_.low, range_.high)
            for name, parameter in PARAMETERS.items()
            for range_ in parameter.ranges.values()
            if range_.integers
        ),
    ):
        if not _fits(value, low, high):
            return f"{name} must be an integer between {low} and {high}, got {value}"
    return None


def _fits(value: object, low: float, high: float) -> bool:
    """Whether an integer is in range; what is no integer is not judged here."""
    return not isinstance(value, int) or low <= value <= high
