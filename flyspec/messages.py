"""What the services and the orchestrator tell each other, as plain values: no I/O, no protobuf.

One class for each message of `protos/` that means something beyond the wire; `wire` converts.
Positions are absolute (prompt included), times in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from flyspec.types import (
    Budget,
    Decision,
    OpenWindow,
    Origin,
    Rule,
    SamplingParams,
    TokenDistribution,
    TokenLogprobs,
)

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Facts about a loaded model (see the proto message of this name)."""

    name: str
    tokenizer_fingerprint: str
    vocab_size: int
    context_length: int
    dtype: str = ""
    device: str = ""
    num_parameters: int = 0


@dataclass(frozen=True, slots=True)
class SessionStatus:
    """Sessions that a service holds, and tokens its KV cache was asked for and had."""

    active: int
    limit: int
    opened_total: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """A process that serves. Another `instance_id` means that it has been started again."""

    instance_id: str = ""
    process_id: int = 0
    num_model_loads: int = 0
    uptime_ns: int = 0


@dataclass(frozen=True, slots=True)
class DrafterInfo:
    """One way of drafting that a draft service offers. `model` is None for prompt lookup."""

    name: str
    kind: str
    model: ModelInfo | None = None


@dataclass(frozen=True, slots=True)
class DraftServiceInfo:
    """Answer of `DraftService.Describe`."""

    drafters: tuple[DrafterInfo, ...]
    sessions: SessionStatus
    max_speculative_tokens: int
    protocol_version: int = PROTOCOL_VERSION
    process: ProcessInfo = field(default_factory=ProcessInfo)
    tokenizer_fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyServiceInfo:
    """Answer of `VerifyService.Describe`."""

    model: ModelInfo
    sessions: SessionStatus
    max_speculative_tokens: int
    max_plain_tokens: int
    rules: tuple[str, ...]
    protocol_version: int = PROTOCOL_VERSION
    process: ProcessInfo = field(default_factory=ProcessInfo)


@dataclass(frozen=True, slots=True)
class TokenizerBundle:
    """The target's tokenizer and what belongs to it; all that the orchestrator needs of a model."""

    tokenizer_json: bytes
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    control_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    chat_template: str = ""
    generation_config_json: str = ""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a drafter with another tokenizer needs besides a target's `tokenizer.json`.

    `vocab_size` is the number of rows of the target's output layer.
    """

    fingerprint: str
    eos_token_ids: tuple[int, ...]
    control_token_ids: tuple[int, ...]
    vocab_size: int


@dataclass(frozen=True, slots=True)
class DistributionSpec:
    """Which distributions a drafter sends: its `top_k` most likely tokens, 0 for all.

    `draw_from_it`: it draws from what it sends, with noise of its own (the rule `rejection`).
    `raw`: of the model's raw logits instead of the processed ones (`fuzzy-reference`).
    """

    top_k: int = 0
    draw_from_it: bool = False
    raw: bool = False


@dataclass(frozen=True, slots=True)
class DraftOpen:
    """Opens a draft session with the sequence so far, `prompt_length` of it the prompt (0: all).

    `tokenizer_fingerprint` is that of the ids' tokenizer; empty: the drafter's own.
    """

    token_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    drafter: str = ""
    prompt_length: int = 0
    distribution: DistributionSpec | None = None
    tokenizer_fingerprint: str = ""


@dataclass(frozen=True, slots=True)
class DraftAdvance:
    """Keep `keep_length` tokens, append `append_token_ids`, propose up to `max_tokens`.

    `traceparent` is that of the span that waits for it; empty if the request is not traced.
    """

    round_id: int
    keep_length: int
    append_token_ids: Sequence[int]
    max_tokens: int
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class DraftTimings:
    """Times of one proposal inside the draft service, ns."""

    queue_ns: int = 0
    model_ns: int = 0
    service_ns: int = 0


@dataclass(frozen=True, slots=True)
class DraftChunk:
    """A piece of a proposal; `start_position` is that of its first token.

    `distributions` has one a token if they were asked for.
    """

    round_id: int
    keep_length: int
    next_token_id: int
    start_position: int
    token_ids: Sequence[int]
    origins: Sequence[Origin]
    last: bool
    timings: DraftTimings = field(default_factory=DraftTimings)
    distributions: Sequence[TokenDistribution] = ()


@dataclass(frozen=True, slots=True)
class VerifyOpen:
    """Opens a verify session with the sequence so far, `prompt_length` of it the prompt.

    `logprobs` is the number of most likely tokens to tell the log-probabilities of; None tells none
    at all.
    """

    token_ids: Sequence[int]
    prompt_length: int
    rule: Rule
    sampling: SamplingParams
    seed: int
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class DraftDistributions:
    """Distributions of drafts of a round, from absolute `first_position` on."""

    round_id: int
    first_position: int
    distributions: Sequence[TokenDistribution]


@dataclass(frozen=True, slots=True)
class VerifyRound:
    """Keep, append, then judge the drafts; without drafts, decode up to `max_plain_tokens`.

    `traceparent` is that of the span that waits for the verdict; empty if it is not traced.
    """

    round_id: int
    keep_length: int
    append_token_ids: Sequence[int]
    draft_token_ids: Sequence[int]
    prefix_hash: int = 0
    max_plain_tokens: int = 1
    budget: Budget = field(default_factory=Budget)
    exact_until_position: int = 0
    open_window: OpenWindow | None = None
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class VerifyTimings:
    """Times of one verdict inside the verify service, ns."""

    queue_ns: int = 0
    forward_ns: int = 0
    judge_ns: int = 0
    service_ns: int = 0


@dataclass(frozen=True, slots=True)
class RoundVerdict:
    """Answer to a `VerifyRound`: the sequence is `keep_length` tokens, then `next_token_id`.

    `logprobs`, if asked for, has one for each token from where the round began, or from
    `keep_length` if that is less, up to and including `next_token_id`.
    """

    round_id: int
    keep_length: int
    next_token_id: int
    committed_length: int
    decisions: Sequence[Decision]
    last: bool
    timings: VerifyTimings = field(default_factory=VerifyTimings)
    open_window: OpenWindow | None = None
    logprobs: Sequence[TokenLogprobs] = ()
