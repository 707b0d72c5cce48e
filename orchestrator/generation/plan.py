"""Validates a request and fills in its defaults."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flyspec.config import OrchestratorSettings
from flyspec.errors import ContextLengthError, InvalidArgumentError
from flyspec.ranges import Range
from flyspec.rule_files import RuleBook
from flyspec.rules import Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import validate_rule
from flyspec.rules.room import Room
from flyspec.speculation_length import (
    AUTO,
    MOST_BY_AUTO,
    REQUESTED_BY_AUTO,
    SpeculationLength,
    requested,
)
from flyspec.tokenizer import Tokenizer
from flyspec.validation import (
    common_distribution_spec,
    distribution_spec,
    distribution_warnings,
    validate_sampling,
)
from flyspec.values.admin import ModelInfo, VerifyServiceInfo
from flyspec.values.generation import Started
from flyspec.values.phases import Phase, rule_names
from flyspec.values.requests import GenerateOptions, GenerationRequest
from flyspec.values.rounds import Budget, DistributionSpec
from flyspec.values.tokens import MAX_TOP_LOGPROBS, SamplingParams
from flyspec.version import __version__
from orchestrator.generation.phase_plan import (
    EXACT,
    RulesAsked,
    check_cost,
    check_exact_inside,
    check_number_of_rules,
    check_texts,
    check_tokens,
    plan_phases,
)
from orchestrator.generation.phases import Phases
from orchestrator.generation.prompt import check_ids, encode_prediction, encode_prompt

SEED_BITS = 53
"""Of seeds that are drawn; JavaScript's numbers keep no more."""


@dataclass(frozen=True, slots=True)
class OutputLimits:
    """Limits of the output.

    `end_token_ids` are the target's ends of sequence and `stop_token_ids`. Where no target runs,
    for a recorded output, `context_length` and `max_plain_tokens` are 0.
    """

    max_tokens: int
    context_length: int = 0
    max_plain_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    end_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Judging:
    """The rules, and what they may accept.

    `rule` is a preset with every parameter set; of several phases, the first one's. `phases` are
    the request's, with such rules; none if `rule` alone holds everywhere and nothing is
    `exact_inside`. `allowed` is the budget of all phases together. `loop_guard` switches to exact
    acceptance when the output repeats itself; it is off for lossless rules. More drafts than
    `judged_k` are judged as several rounds of that many (0: always as one). `judge_fingerprint` is
    that of the judge it needs, empty for none.
    """

    rule: Rule
    phases: tuple[Phase, ...] = ()
    exact_inside: tuple[str, ...] = ()
    allowed: Budget = field(default_factory=Budget)
    exact_until_position: int = 0
    loop_guard: bool = False
    judged_k: int = 0
    judge_fingerprint: str = ""

    @property
    def has_budget(self) -> bool:
        return self.allowed != Budget() or any(phase.has_budget for phase in self.phases)

    @property
    def phase_rules(self) -> tuple[Rule, ...]:
        """The rules of the phases, in their order."""
        return tuple(phase.rule for phase in self.phases if phase.rule) or (self.rule,)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of the session with the target, by `RuleSegment.rule_index`."""
        return (*self.phase_rules, EXACT) if self.exact_inside else self.phase_rules

    @property
    def names(self) -> str:
        """The names of the phases' rules, for logs."""
        return rule_names(self.phase_rules)

    @property
    def main_rule(self) -> Rule:
        """The first phase's rule that is not token-exact, or `exact`: where one must do."""
        rules = self.phase_rules
        return next((rule for rule in rules if not RULE_PRESETS[rule.name].token_exact), rules[0])

    @property
    def room(self) -> Room:
        """Room for drafts of the main rule that differ from the target's tokens."""
        rule = self.main_rule
        within = rule.window_scope is WindowScope.WITHIN_ROUND
        return Room(rule.fly_window_size or 0 if within else 0, self.judged_k)

    @property
    def lossless(self) -> bool:
        """True if the output follows the target's distribution in all phases."""
        return all(RULE_PRESETS[rule.name].lossless for rule in self.phase_rules)

    @property
    def token_exact(self) -> bool:
        """True if the output equals plain decoding in all phases."""
        return all(RULE_PRESETS[rule.name].token_exact for rule in self.phase_rules)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Drafting: the drafter and the number of drafts.

    If `adaptive`, K is at most `num_speculative_tokens`, after the rounds of
    `num_draft_tokens_per_round`. `distribution` selects the draft distributions the rule needs, if
    any. `prediction` is in tokens, of which those `invisible` in text do not count. With `trees`,
    drafters may propose trees.
    """

    num_speculative_tokens: int
    adaptive: bool = False
    num_draft_tokens_per_round: Sequence[int] = ()
    drafter: str = ""
    distribution: DistributionSpec | None = None
    prediction: Sequence[int] = ()
    invisible: frozenset[int] = frozenset()
    trees: bool = False

    @property
    def draws(self) -> bool:
        """True if drafts are drawn from distributions that a rule judges them by, at random.

        Then none may be dropped for what it is: whether a position is checked depends on the drafts
        before it alone.
        """
        return self.distribution is not None and self.distribution.draw_from_it


@dataclass(frozen=True, slots=True)
class Reporting:
    """Reports to the caller besides the final text.

    `logprobs` is how many of the most likely tokens to return log-probabilities for; None returns
    none at all.
    """

    eager: bool = False
    logprobs: int | None = None
    return_rounds: bool = False
    return_draft_distributions: bool = False


@dataclass(frozen=True, slots=True)
class GenerationPlan:
    """The validated parameters of one generation. `warnings` are for the caller."""

    prompt_token_ids: list[int]
    sampling: SamplingParams
    seed: int
    limits: OutputLimits
    judging: Judging
    drafts: DraftPlan
    reporting: Reporting = Reporting()
    warnings: tuple[str, ...] = ()

    @property
    def may_draft_trees(self) -> bool:
        """True if a proposal may be a tree: one rule, of chains' verdicts, judges it."""
        return self.drafts.trees and self.drafts.distribution is None and not self.judging.phases

    def tracked(self, tokenizer: Tokenizer) -> Phases | None:
        """Return what finds out which phase holds where; None if there is only one rule."""
        judging = self.judging
        if not judging.phases:
            return None
        texts, length = tokenizer.detokenizer(), len(self.prompt_token_ids)
        return Phases(judging.phases, judging.exact_inside, texts, length)

    @property
    def max_total_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.limits.max_tokens

    def started(self, request_id: str, model: ModelInfo, drafter: str) -> Started:
        judging, drafts = self.judging, self.drafts
        return Started(
            request_id=request_id,
            model=model.name,
            drafter=drafter if drafts.num_speculative_tokens else "",
            seed=self.seed,
            prompt_token_ids=self.prompt_token_ids,
            rule=judging.rule,
            num_speculative_tokens=drafts.num_speculative_tokens,
            adaptive=drafts.adaptive,
            warnings=self.warnings,
            phases=judging.phases,
            exact_inside=judging.exact_inside,
            sampling=self.sampling,
            max_tokens=self.limits.max_tokens,
            max_loose_tokens=judging.allowed.loose_tokens,
            max_loose_cost_nats=judging.allowed.loose_cost_nats,
            exact_until_position=judging.exact_until_position,
            weights_fingerprint=model.weights_fingerprint,
            numerics=model.numerics,
            server_version=__version__,
            stop_token_ids=sorted(self.limits.stop_token_ids),
        )


def make_plan(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    target: VerifyServiceInfo,
    settings: OrchestratorSettings,
    max_draft_tokens: int,
    rules: RuleBook,
) -> GenerationPlan:
    """Check a request. Raises `InvalidArgumentError`, naming the field and what is allowed.

    `max_draft_tokens` is the maximum that both services support per round.
    """
    options, limits = request.options, rules.limits
    prompt = encode_prompt(request.prompt, tokenizer, target.model)
    max_tokens = _max_tokens(options, len(prompt), target.model.context_length)
    sampling = _sampling(options, target, max_tokens)
    # Unresolved: a rule's parameters may be given without its name.
    given = options.rule or Rule("")
    if not given.name:
        given = replace(given, name=settings.rule)
    length = _length(options, settings)
    # W depends on the requested K, however many tokens a round drafts.
    asked = RulesAsked(rules, given, requested(length), target)
    phases = plan_phases(options, asked, target)
    exact_inside = check_exact_inside(options.exact_inside)
    if phases and given.name in RULE_PRESETS:
        validate_rule(given)  # though phases replace it
    rule = phases[0].rule if phases else asked.resolve(given)
    assert rule is not None
    if exact_inside and not phases:
        phases = (Phase(rule),)
    cost, context_length = options.max_loose_cost_nats, target.model.context_length
    judging = Judging(
        rule,
        phases,
        exact_inside,
        exact_until_position=min(len(prompt) + options.exact_prefix_tokens, context_length),
        judge_fingerprint=asked.judge_fingerprint,
    )
    used = judging.phase_rules
    check_number_of_rules(len(judging.rules), target)
    k, judged_k = _num_speculative_tokens(options, length, max_draft_tokens, rules), 0
    if length == AUTO and not judging.token_exact:
        # Longer rounds, with fewer bonus tokens, would accept more mismatches.
        judged_k = REQUESTED_BY_AUTO
        if any(each.window_scope is WindowScope.ACROSS_ROUNDS for each in used):
            k = min(k, REQUESTED_BY_AUTO)
    asked.check_guarded(target.model)
    check_cost("speculation.max_loose_cost_nats", cost)
    limits.check_loop_guard(options.disable_loop_guard)
    logprobs = options.logprobs
    if logprobs is not None:
        Range(0, MAX_TOP_LOGPROBS).check("logprobs", logprobs)
    distribution = common_distribution_spec(used, sampling) if k else None
    warnings = asked.warnings(k)
    for each in used:
        if distribution_spec(each, sampling) is not None:
            warnings += distribution_warnings(each, distribution, k, target.model.vocab_size)
    # Stop strings are limited because output is held back to match them.
    check_texts("stop", options.stop)
    check_tokens("stop_token_ids", options.stop_token_ids, target.model)
    stop_token_ids = frozenset(options.stop_token_ids)
    allowed = Budget(
        limits.bound("max_loose_tokens", options.max_loose_tokens),
        limits.bound("max_loose_cost_nats", cost),
    )
    loop_guard = not (judging.lossless or options.disable_loop_guard)
    return GenerationPlan(
        prompt,
        sampling,
        secrets.randbits(SEED_BITS) if options.seed is None else options.seed,
        OutputLimits(
            max_tokens,
            context_length,
            target.max_plain_tokens,
            tuple(options.stop),
            stop_token_ids,
            tokenizer.eos_token_ids | stop_token_ids,
            options.ignore_eos,
        ),
        replace(judging, allowed=allowed, loop_guard=loop_guard, judged_k=judged_k),
        DraftPlan(
            k,
            length == AUTO,
            options.num_draft_tokens_per_round,
            options.drafter,
            distribution,
            _prediction(options, k, tokenizer, target),
            tokenizer.control_token_ids,
            settings.draft_trees == "on",
        ),
        Reporting(
            options.eager, logprobs, options.return_rounds, options.return_draft_distributions
        ),
        tuple(dict.fromkeys(warnings)),
    )


def _prediction(
    options: GenerateOptions, k: int, tokenizer: Tokenizer, target: VerifyServiceInfo
) -> Sequence[int]:
    if options.prediction and options.num_speculative_tokens == 0:
        raise InvalidArgumentError(
            "prediction: not with speculation.num_speculative_tokens 0, which drafts nothing"
        )
    return encode_prediction(options.prediction, tokenizer, target.model) if k else ()


def _max_tokens(options: GenerateOptions, prompt_length: int, context_length: int) -> int:
    """Return the maximum output tokens: as requested, or as many as fit the context."""
    asked, room = options.max_tokens, context_length - prompt_length
    if asked is None:
        return room
    if asked < 1:
        raise InvalidArgumentError(f"max_tokens must be at least 1, got {asked}")
    if asked > room:
        raise ContextLengthError(
            f"max_tokens: this model's maximum context length is {context_length} tokens, of which "
            f"the prompt has {prompt_length}: at most {room} are left, got {asked}; ask for fewer, "
            "or shorten the prompt"
        )
    return asked


def _sampling(
    options: GenerateOptions, target: VerifyServiceInfo, max_tokens: int
) -> SamplingParams:
    sampling = options.sampling
    validate_sampling(sampling)
    if sampling.min_tokens > max_tokens:
        raise InvalidArgumentError(
            f"sampling.min_tokens must be between 0 and {max_tokens} (max_tokens, or the room left "
            f"in the context), got {sampling.min_tokens}"
        )
    check_ids(
        "sampling.logit_bias", [token_id for token_id, _ in sampling.logit_bias], target.model
    )
    return sampling


def _length(options: GenerateOptions, settings: OrchestratorSettings) -> SpeculationLength:
    """Return the requested K, else the server's; it is adaptive after explicitly given rounds."""
    asked = options.num_speculative_tokens
    if asked is None:
        return AUTO if options.num_draft_tokens_per_round else settings.num_speculative_tokens
    return asked


def _num_speculative_tokens(
    options: GenerateOptions, length: SpeculationLength, max_draft_tokens: int, rules: RuleBook
) -> int:
    """Return the maximum drafts per round: as requested, within what the services support."""
    ceiling = rules.limits.max_num_speculative_tokens
    most = max_draft_tokens if ceiling is None else min(max_draft_tokens, ceiling)
    if options.num_draft_tokens_per_round and length != AUTO:
        most = min(most, length)
    for index, k in enumerate(options.num_draft_tokens_per_round):
        if not 0 <= k <= most:  # there may be tens of thousands
            Range(0, most).check(f"speculation.num_draft_tokens_per_round[{index}]", k)
    if length == AUTO:
        return min(MOST_BY_AUTO, most)
    if options.num_speculative_tokens is None:
        return min(length, most)
    Range(0, most).check("speculation.num_speculative_tokens", length)
    return length
