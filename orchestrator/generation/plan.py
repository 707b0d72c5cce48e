"""A request checked and completed: every default filled in, every range enforced."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from flyspec import wire
from flyspec.config import OrchestratorSettings
from flyspec.errors import InvalidArgumentError
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.tokenizer import Tokenizer
from flyspec.v1 import generation_pb2
from flyspec.validation import (
    MAX_TOP_LOGPROBS,
    distribution_spec,
    distribution_warnings,
    validate_sampling,
)
from flyspec.values.admin import VerifyServiceInfo
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from orchestrator.generation.prompt_size import check_count, check_size
from orchestrator.generation.rule_files import RuleBook

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What one generation will do.

    `rule` is a preset with every parameter set. `loop_guard`: turn exact when the output repeats
    itself; never for a rule that loses nothing. `logprobs`: most likely tokens to tell the
    log-probabilities of, None for none at all. `distribution`: which of the draft's distributions
    the rule needs, None for none. `warnings` are for the caller.
    """

    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    drafter: str
    rule: Rule
    num_speculative_tokens: int
    max_loose_tokens: int | None
    max_loose_cost_nats: float | None
    exact_until_position: int
    context_length: int
    max_plain_tokens: int
    eager: bool
    loop_guard: bool
    logprobs: int | None
    warnings: tuple[str, ...]
    return_rounds: bool
    distribution: DistributionSpec | None


def make_plan(
    request: generation_pb2.GenerateRequest,
    tokenizer: Tokenizer,
    target: VerifyServiceInfo,
    settings: OrchestratorSettings,
    max_draft_tokens: int,
    rules: RuleBook,
) -> GenerationPlan:
    """Check a request; `InvalidArgumentError` names the field and what is allowed.

    `max_draft_tokens` is what both services take in one round.
    """
    prompt = _prompt(request, tokenizer, target)
    max_tokens = _max_tokens(request, target.model.context_length - len(prompt))
    sampling = _sampling(request, target, max_tokens)
    speculation = request.speculation
    limits = rules.limits
    k = _num_speculative_tokens(speculation, settings, max_draft_tokens, rules)
    given = wire.rule_from_proto(speculation.rule)
    if not given.name:
        given = replace(given, name=settings.rule)
    asked = _given(speculation, "num_speculative_tokens")
    rule = rules.resolve(given, settings.num_speculative_tokens if asked is None else asked)
    _check_ids("rule.guarded_token_ids", rule.guarded_token_ids, target)
    cost = _given(speculation, "max_loose_cost_nats")
    if cost is not None and not 0 <= cost < math.inf:  # NaN too
        raise InvalidArgumentError(
            f"speculation.max_loose_cost_nats must be a finite number of at least 0, got {cost:g}"
        )
    limits.check_loop_guard(speculation.disable_loop_guard)
    logprobs = _given(request, "logprobs")
    if logprobs is not None and logprobs > MAX_TOP_LOGPROBS:
        raise InvalidArgumentError(
            f"logprobs must be between 0 and {MAX_TOP_LOGPROBS}, got {logprobs}"
        )
    distribution = distribution_spec(rule, sampling) if k else None
    warnings = rules.warnings(given, rule, k)
    warnings += distribution_warnings(rule, distribution, k, target.model.vocab_size)
    return GenerationPlan(
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        stop=_stop(request),
        ignore_eos=request.ignore_eos,
        drafter=speculation.drafter,
        rule=rule,
        num_speculative_tokens=k,
        max_loose_tokens=limits.bound_loose_tokens(_given(speculation, "max_loose_tokens")),
        max_loose_cost_nats=limits.bound_loose_cost_nats(cost),
        exact_until_position=min(
            len(prompt) + speculation.exact_prefix_tokens, target.model.context_length
        ),
        context_length=target.model.context_length,
        max_plain_tokens=target.max_plain_tokens,
        eager=speculation.eager,
        loop_guard=not (RULE_PRESETS[rule.name].lossless or speculation.disable_loop_guard),
        logprobs=logprobs,
        warnings=tuple(warnings),
        return_rounds=request.return_rounds,
        distribution=distribution,
    )


def _given(message: Any, name: str) -> Any:
    """The value of an optional field, None if it is unset."""
    return getattr(message, name) if message.HasField(name) else None


def _max_tokens(request: generation_pb2.GenerateRequest, room: int) -> int:
    """Most tokens of the output: what was asked for, or what the context leaves."""
    if not request.HasField("max_tokens"):
        return room
    if request.max_tokens < 1:
        raise InvalidArgumentError("max_tokens must be at least 1, got 0")
    return min(request.max_tokens, room)


def _sampling(
    request: generation_pb2.GenerateRequest, target: VerifyServiceInfo, max_tokens: int
) -> SamplingParams:
    """How tokens are chosen; greedy if the request does not say."""
    sampling = wire.sampling_from_proto(request.sampling)
    validate_sampling(sampling)
    if sampling.min_tokens > max_tokens:
        raise InvalidArgumentError(
            f"sampling.min_tokens must be between 0 and {max_tokens} (max_tokens, or what is left "
            f"of the context), got {sampling.min_tokens}"
        )
    _check_ids("sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias], target)
    return sampling


def _num_speculative_tokens(
    speculation: generation_pb2.Speculation,
    settings: OrchestratorSettings,
    max_draft_tokens: int,
    rules: RuleBook,
) -> int:
    """K: the request's, or the server's as far as the services go along."""
    ceiling = rules.limits.max_num_speculative_tokens
    most = max_draft_tokens if ceiling is None else min(max_draft_tokens, ceiling)
    if not speculation.HasField("num_speculative_tokens"):
        return min(settings.num_speculative_tokens, most)
    k: int = speculation.num_speculative_tokens
    if k > most:
        raise InvalidArgumentError(
            f"speculation.num_speculative_tokens must be between 0 and {most}, got {k}"
        )
    return k


def _check_ids(field: str, token_ids: Sequence[int], target: VerifyServiceInfo) -> None:
    """Refuse token ids that the target does not have."""
    model = target.model
    if token_ids and max(token_ids) >= model.vocab_size:
        raise InvalidArgumentError(
            f"{field}: token id {max(token_ids)} is out of range; {model.name} has ids "
            f"0 to {model.vocab_size - 1}"
        )


def _prompt(
    request: generation_pb2.GenerateRequest, tokenizer: Tokenizer, target: VerifyServiceInfo
) -> list[int]:
    """The prompt's token ids, at least one, leaving room for at least one more."""
    model = target.model

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidArgumentError("prompt: text is empty; send at least one character")
            check_size([request.text], num_tokens, model.context_length)
            token_ids = tokenizer.encode(request.text)
        case "token_ids":
            check_count("tokens", len(request.token_ids.ids), model.context_length)
            token_ids = list(request.token_ids.ids)
        case "chat":
            if not request.chat.messages:
                raise InvalidArgumentError("prompt: chat has no messages; send at least one")
            check_count("messages", len(request.chat.messages), model.context_length)
            check_size([m.content for m in request.chat.messages], num_tokens, model.context_length)
            token_ids = tokenizer.encode_chat([(m.role, m.content) for m in request.chat.messages])
        case _:
            raise InvalidArgumentError("prompt: set one of text, token_ids, chat")
    if not token_ids:
        raise InvalidArgumentError("prompt: no token ids; send at least one")
    _check_ids("prompt", token_ids, target)
    if len(token_ids) >= model.context_length:
        raise InvalidArgumentError(
            f"prompt: {len(token_ids)} tokens leave no room in the model's context of "
            f"{model.context_length}; shorten the prompt"
        )
    return token_ids


def _stop(request: generation_pb2.GenerateRequest) -> tuple[str, ...]:
    """The stop strings, bounded because text is held back for them."""
    if len(request.stop) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(
            f"stop: at most {MAX_STOP_STRINGS} strings, got {len(request.stop)}"
        )
    for stop in request.stop:
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            raise InvalidArgumentError(
                f"stop: each string must have 1 to {MAX_STOP_CHARACTERS} characters, "
                f"got {len(stop)}"
            )
    return tuple(request.stop)
