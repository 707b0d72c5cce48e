"""Output of a generation: its events, metrics and times; and descriptions of the models."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import IntEnum
from itertools import zip_longest
from typing import Any

from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.admin import ModelInfo
from flyspec.values.phases import Phase, rule_names
from flyspec.values.rounds import Budget, Decision, DraftCounts, OpenWindow, RuleSegment
from flyspec.values.tokens import Origin, SamplingParams, TokenDistribution, TokenLogprobs


class FinishReason(IntEnum):
    """Why a generation ended."""

    STOP = 1
    LENGTH = 2


class RecoveryKind(IntEnum):
    """Kinds of continuation after a generation lost a service."""

    TARGET_REOPENED = 1
    DRAFTER_REOPENED = 2
    DRAFTER_REPLACED = 3
    DRAFTER_FALLBACK = 4
    DRAFTER_RESTORED = 5
    DRAFTER_SWAPPED = 6


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Some of a scored text's tokens, in order, each with the text that it completed.

    `logprobs` has one entry per token, given all tokens before it, except the text's first.
    """

    token_ids: Sequence[int]
    token_texts: Sequence[str] = ()
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Started:
    """The generation was admitted; `rule` has all parameters resolved, as have those of `phases`.

    `num_speculative_tokens` is the maximum per round if K is `adaptive`. `warnings` are messages
    for the caller about the parameters. `sampling`, `max_tokens` and the limits of loose tokens are
    what holds, whether by request, operator or default; `weights_fingerprint` and `numerics` are
    the target's.
    """

    request_id: str
    model: str
    drafter: str
    seed: int
    prompt_token_ids: Sequence[int]
    rule: Rule
    num_speculative_tokens: int
    warnings: Sequence[str] = ()
    adaptive: bool = False
    phases: Sequence[Phase] = ()
    exact_inside: Sequence[str] = ()
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 0
    max_loose_tokens: int | None = None
    max_loose_cost_nats: float | None = None
    exact_until_position: int = 0
    weights_fingerprint: str = ""
    numerics: str = ""
    server_version: str = ""
    stop_token_ids: Sequence[int] = ()

    @property
    def rules_by_index(self) -> tuple[Rule, ...]:
        """The session's rules, as `RuleSegment.rule_index` counts them."""
        phases = tuple(phase.rule or self.rule for phase in self.phases) or (self.rule,)
        return (*phases, Rule("exact")) if self.exact_inside else phases

    @property
    def rules(self) -> str:
        """The names of its rules, in the order of the phases: `relaxed, exact`."""
        return rule_names([phase.rule for phase in self.phases if phase.rule] or [self.rule])

    @property
    def lossless(self) -> bool:
        """True if the output follows the target's distribution in all phases."""
        return all(RULE_PRESETS[rule.name].lossless for rule in self.rules_by_index)


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens with their origins, and the text that each completed.

    Final, unless the request is `eager`: then the output's first `num_final_tokens` are.
    `loose_gaps_nats` has one entry per LOOSE token, in order; `logprobs` one per token, if
    requested.
    """

    text: str
    token_ids: Sequence[int]
    origins: Sequence[Origin]
    token_texts: Sequence[str] = ()
    num_final_tokens: int = 0
    loose_gaps_nats: Sequence[float] = ()
    logprobs: Sequence[TokenLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Retract:
    """Drops tokens that were sent before they were final (only with `eager`).

    The output keeps its first `output_token_index` tokens and `text_byte_offset` bytes of UTF-8.
    """

    output_token_index: int
    text_byte_offset: int


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A round as it was judged (see the proto message `GenerationRound`).

    Together with the sequence before it, everything that the verdict depended on.
    `draft_distributions` has one per draft if requested and needed by the rule.
    """

    start_length: int
    drafter: str
    draft_token_ids: Sequence[int]
    decisions: Sequence[Decision]
    keep_length: int
    next_token_id: int
    committed_length: int
    budget: Budget = field(default_factory=Budget)
    exact_until_position: int = 0
    open_window: OpenWindow | None = None
    num_speculative_tokens: int = 0
    draft_origins: Sequence[Origin] = ()
    plain_token_ids: Sequence[int] = ()
    draft_distributions: Sequence[TokenDistribution] = ()
    rule_segments: Sequence[RuleSegment] = ()

    def document(self) -> dict[str, Any]:
        """Return it for JSON, with the names of the proto message; outcomes and origins by name.

        Without the distributions, which only recordings have.
        """
        window = self.open_window
        facts = {item.name: getattr(self, item.name) for item in fields(self)}
        del facts["budget"], facts["draft_distributions"]
        return {
            **facts,
            "decisions": [d._asdict() | {"outcome": d.outcome.name} for d in self.decisions],
            "remaining_loose_tokens": self.budget.loose_tokens,
            "remaining_loose_cost_nats": self.budget.loose_cost_nats,
            "open_window": window._asdict() if window else None,
            "rule_segments": [segment.document() for segment in self.rule_segments],
            "draft_origins": [origin.name for origin in self.draft_origins],
        }


@dataclass(frozen=True, slots=True)
class Recovery:
    """Kinds of continuation after a generation lost a service."""

    kind: RecoveryKind
    output_token_index: int
    elapsed_ns: int
    delay_ns: int
    successor: str
    reason: str

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self) | {"kind": self.kind.name}


@dataclass(slots=True)
class DrafterShare(DraftCounts):
    """A drafter's part in a generation."""

    drafter: str = ""


@dataclass(slots=True)
class SpeculationMetrics(DraftCounts):
    """Speculation in one request (see the proto message of this name).

    Loose tokens and their cost count once final, accepted drafts once no window can drop them.
    Drafts beyond the output's end, such as after `max_tokens`, do not count. Bytes are of the
    rounds' messages before HTTP/2 framing, including resent ones but not those that open sessions.
    """

    num_loose_tokens: int = 0
    loose_cost_nats: float = 0.0
    num_rollbacks: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    num_rounds: int = 0
    num_rejected_tokens: int = 0
    rejected_cost_nats: float = 0.0
    round_bytes: int = 0
    distribution_bytes: int = 0
    num_plain_tokens: int = 0
    num_plain_bursts: int = 0
    num_drafter_stops: int = 0
    num_scored_tokens: int = 0
    num_agreed_tokens: int = 0
    saved_ns: int = 0
    num_staging_rounds: int = 0
    num_staged_hits: int = 0
    num_unrepeated_rounds: int = 0

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted drafts per round with drafts; 1 if nothing was drafted."""
        return 1.0 + self.num_accepted_draft_tokens / max(1, self.num_spec_steps)

    @property
    def mean_loose_gap_nats(self) -> float | None:
        """Mean log p(most likely) - log p(token) of loosely accepted tokens; None without any."""
        return self.loose_cost_nats / self.num_loose_tokens if self.num_loose_tokens else None

    @property
    def mean_rejected_gap_nats(self) -> float | None:
        """Mean log p(most likely) - log p(token) of rejected mismatches; None without any."""
        count = self.num_rejected_tokens
        return self.rejected_cost_nats / count if count else None

    def document(self) -> dict[str, Any]:
        """Return `metrics.speculative_decoding` of JSON documents, with vLLM's names and ours."""
        counts = asdict(self)
        del counts["num_rounds"]  # plain ones included
        return {
            "mean_acceptance_length": self.mean_acceptance_length,
            "draft_acceptance_rate": self.draft_acceptance_rate,
            **counts,
        }

    @classmethod
    def total(cls, parts: Iterable[SpeculationMetrics]) -> SpeculationMetrics:
        """Return the sums over several requests."""
        total = cls()
        for part in parts:
            for item in fields(cls):
                mine, theirs = getattr(total, item.name), getattr(part, item.name)
                if isinstance(mine, list):
                    theirs = [a + b for a, b in zip_longest(mine, theirs, fillvalue=0)]
                    setattr(total, item.name, theirs)
                else:
                    setattr(total, item.name, mine + theirs)
        return total

    def settle(self, num_accepted: int) -> None:
        """Count the accepted drafts of a final round."""
        histogram = self.acceptance_histogram
        histogram += [0] * (num_accepted + 1 - len(histogram))
        histogram[num_accepted] += 1
        self.num_accepted_draft_tokens += num_accepted

    def count_bytes(self, num_bytes: int, distribution_bytes: int = 0) -> None:
        self.round_bytes += num_bytes
        self.distribution_bytes += distribution_bytes


@dataclass(slots=True)
class GenerationTimings:
    """Times of one request, ns (see the proto message of this name).

    A round's overhead is its time outside both models. The first round has none, since it also
    opens the sessions and reads the prompt: `opening_ns` is from the request's arrival to its end.
    """

    time_to_first_token_ns: int = 0
    total_ns: int = 0
    draft_model_ns: int = 0
    target_model_ns: int = 0
    round_overhead_p50_ns: int = 0
    queue_ns: int = 0
    judge_ns: int = 0
    opening_ns: int = 0
    opening_draft_model_ns: int = 0
    opening_target_model_ns: int = 0


@dataclass(frozen=True, slots=True)
class Completion:
    """The generation ended, by `stop_reason` if that was a stop string or one of `stop_token_ids`.

    `loop_guard_token_index`: output tokens after which judging became exact because the output
    had started to repeat itself; None if it had not. `recoveries` are the first of
    `num_recoveries`, in order; `drafters` are in order of first use. `num_draft_tokens_per_round`
    counts verified drafts; 0 for a token of plain decoding and for a window that failed for lack
    of drafts. To reproduce the run it includes drafts beyond the output's end, so its sum may
    exceed `speculation.num_draft_tokens`. `mixed_numerics`: targets that compute differently took
    part, so the output may differ from that of any one of them (even with `exact`).
    """

    finish_reason: FinishReason
    stop_reason: str | int | None
    prompt_tokens: int
    completion_tokens: int
    speculation: SpeculationMetrics
    timings: GenerationTimings
    loop_guard_token_index: int | None = None
    recoveries: Sequence[Recovery] = ()
    num_recoveries: int = 0
    drafters: Sequence[DrafterShare] = ()
    num_draft_tokens_per_round: Sequence[int] = ()
    mixed_numerics: bool = False


Event = Started | Chunk | Retract | RoundRecord | Completion


@dataclass(frozen=True, slots=True)
class Generation:
    """A complete generation; `chunks` have its final tokens, `rounds` its rounds if requested."""

    started: Started
    chunks: Sequence[Chunk]
    completion: Completion
    rounds: Sequence[RoundRecord] = ()

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def token_ids(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.token_ids]

    @property
    def origins(self) -> list[Origin]:
        return [origin for chunk in self.chunks for origin in chunk.origins]

    @property
    def loose_gaps_nats(self) -> list[float]:
        """Cost of each LOOSE token, in order: log p(most likely) - log p(token), raw logits."""
        return [gap for chunk in self.chunks for gap in chunk.loose_gaps_nats]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """The target's log-probabilities at each token; empty if not requested."""
        return [entry for chunk in self.chunks for entry in chunk.logprobs]

    @property
    def mean_accepted_tokens(self) -> float:
        """τ_acc: emitted tokens per round."""
        return self.completion.completion_tokens / max(1, self.completion.speculation.num_rounds)


RECORDING_VERSION = 1


@dataclass(frozen=True, slots=True)
class Recording:
    """A generation that can be judged again (see the proto message `GenerationRecording`).

    `output` has all final tokens, with their log-probabilities if they were requested.
    """

    started: Started
    output: Chunk
    completion: Completion
    rounds: Sequence[RoundRecord] = ()
    format_version: int = RECORDING_VERSION


@dataclass(frozen=True, slots=True)
class Models:
    """The models, drafters and rules at an address; default drafter and rule come first."""

    target: ModelInfo
    drafters: tuple[str, ...]
    rules: tuple[str, ...]
