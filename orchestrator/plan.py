"""A request checked and completed: every default filled in, every range enforced."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, replace

from flyspec import wire
from flyspec.config import OrchestratorSettings
from flyspec.errors import InvalidArgumentError
from flyspec.tokenizer import Tokenizer
from flyspec.types import Rule, SamplingParams, VerifyServiceInfo
from flyspec.v1 import generation_pb2
from flyspec.validation import resolve_rule, validate_sampling

MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """What one generation will do."""

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


def make_plan(
    request: generation_pb2.GenerateRequest,
    tokenizer: Tokenizer,
    target: VerifyServiceInfo,
    settings: OrchestratorSettings,
    max_draft_tokens: int,
) -> GenerationPlan:
    """Check a request; `InvalidArgumentError` names the field and what is allowed.

    `max_draft_tokens` is what both services take in one round.
    """
    prompt = _prompt(request, tokenizer, target)
    room = target.model.context_length - len(prompt)
    max_tokens = room
    if request.HasField("max_tokens"):
        if request.max_tokens < 1:
            raise InvalidArgumentError("max_tokens must be at least 1, got 0")
        max_tokens = min(request.max_tokens, room)
    sampling = (
        wire.sampling_from_proto(request.sampling)
        if request.HasField("sampling")
        else SamplingParams()
    )
    validate_sampling(sampling)
    speculation = request.speculation
    k = min(settings.num_speculative_tokens, max_draft_tokens)
    if speculation.HasField("num_speculative_tokens"):
        k = speculation.num_speculative_tokens
        if k > max_draft_tokens:
            raise InvalidArgumentError(
                f"speculation.num_speculative_tokens must be between 0 and {max_draft_tokens}, "
                f"got {k}"
            )
    rule = wire.rule_from_proto(speculation.rule)
    if not rule.name:
        rule = replace(rule, name=settings.rule)
    if not speculation.max_loose_cost_nats >= 0:  # NaN too
        raise InvalidArgumentError(
            "speculation.max_loose_cost_nats must be at least 0, "
            f"got {speculation.max_loose_cost_nats}"
        )
    return GenerationPlan(
        prompt_token_ids=prompt,
        sampling=sampling,
        seed=request.seed if request.HasField("seed") else secrets.randbits(64),
        max_tokens=max_tokens,
        stop=_stop(request),
        ignore_eos=request.ignore_eos,
        drafter=speculation.drafter,
        rule=resolve_rule(rule, k),
        num_speculative_tokens=k,
        max_loose_tokens=(
            speculation.max_loose_tokens if speculation.HasField("max_loose_tokens") else None
        ),
        max_loose_cost_nats=(
            speculation.max_loose_cost_nats if speculation.HasField("max_loose_cost_nats") else None
        ),
        exact_until_position=min(
            len(prompt) + speculation.exact_prefix_tokens, target.model.context_length
        ),
        context_length=target.model.context_length,
        max_plain_tokens=target.max_plain_tokens,
    )


def _prompt(
    request: generation_pb2.GenerateRequest, tokenizer: Tokenizer, target: VerifyServiceInfo
) -> list[int]:
    """The prompt's token ids, at least one, leaving room for at least one more."""
    match request.WhichOneof("prompt"):
        case "text":
            if not request.text:
                raise InvalidArgumentError("prompt: text is empty; send at least one character")
            token_ids = tokenizer.encode(request.text)
        case "token_ids":
            token_ids = list(request.token_ids.ids)
        case "chat":
            if not request.chat.messages:
                raise InvalidArgumentError("prompt: chat has no messages; send at least one")
            token_ids = tokenizer.encode_chat([(m.role, m.content) for m in request.chat.messages])
        case _:
            raise InvalidArgumentError("prompt: set one of text, token_ids, chat")
    if not token_ids:
        raise InvalidArgumentError("prompt: no token ids; send at least one")
    model = target.model
    if max(token_ids) >= model.vocab_size:
        raise InvalidArgumentError(
            f"prompt: token id {max(token_ids)} is out of range; {model.name} has ids "
            f"0 to {model.vocab_size - 1}"
        )
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
