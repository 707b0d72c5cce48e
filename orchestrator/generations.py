"""Runs a generation from request to completion, in plain values, independently of transport."""

from __future__ import annotations

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from typing import NoReturn

from flyspec.concurrency import in_turn
from flyspec.config import OrchestratorSettings
from flyspec.errors import FlyspecError
from flyspec.rule_files import RuleBook
from flyspec.values.chat import Chat
from flyspec.values.generation import Chunk, Completion, Event, Models, ScoredTokens
from flyspec.values.requests import GenerateOptions, GenerationRequest, ScoreRequest
from orchestrator.admission.admission import Admission, Visit
from orchestrator.admission.clients import NOBODY, Caller, check_tokens
from orchestrator.exact_twins import ExactTwins
from orchestrator.fleet.fleet import Fleet
from orchestrator.fleet.target import Target
from orchestrator.generation.drafting import Drafting
from orchestrator.generation.ledger import Ledger, Recoveries
from orchestrator.generation.output import Output
from orchestrator.generation.pace import FirstToken, FixedPace, Pace, RepeatedPace
from orchestrator.generation.plan import GenerationPlan, make_plan
from orchestrator.generation.progress import Progress
from orchestrator.generation.prompt import is_long
from orchestrator.generation.rounds import Rounds
from orchestrator.generation.scoring import Scoring
from orchestrator.generation.staging import StagingTrial
from orchestrator.generation.verifying import Verifying
from orchestrator.generation.window import Token
from orchestrator.pace.policy import AdaptivePace, Experience
from orchestrator.telemetry.requests import Observation, RequestObserver


class Generations:
    """Runs generations, one per call of `run`, for any transport."""

    def __init__(
        self,
        fleet: Fleet,
        admission: Admission,
        settings: OrchestratorSettings,
        rules: RuleBook,
        observer: RequestObserver,
        twins: ExactTwins | None = None,
    ) -> None:
        self._fleet, self._admission = fleet, admission
        self._settings, self._rules, self._observer = settings, rules, observer
        self._twins = twins
        self._learned: tuple[Target, Experience] | None = None
        self._trials = defaultdict[str, StagingTrial](StagingTrial)

    async def run(
        self, request: GenerationRequest, caller: Caller = NOBODY
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of one generation as they occur, ending with its `Completion`.

        Must be read in one task. To end the generation early, close the generator
        (`contextlib.aclosing`) or throw the cause into it. IDs and the deadline are taken from
        `caller`, not from the request. Raises `FlyspecError`.
        """
        with self._observer.request(caller) as observation:
            visit = self._visit(caller)
            async with visit, aclosing(self._admitted(request, caller, visit, observation)) as told:
                async for event in told:
                    visit.pause()
                    yield event
                    visit.resume()

    async def _admitted(
        self, request: GenerationRequest, caller: Caller, visit: Visit, observation: Observation
    ) -> AsyncGenerator[Event, None]:
        """Plan an admitted request, wait for a slot, run its rounds, and yield its events."""
        arrived = time.perf_counter_ns()
        fleet, target = self._fleet, self._fleet.target
        model = target.info.model
        plan = await self._checked(request, target, caller)
        experience = self._experience(target)
        reporting = plan.reporting
        output = Output(target.tokenizer, plan.limits, plan.sampling.min_tokens)
        kept: list[Token] | None = [] if self._twins and self._twins.wants(plan) else None
        phases = plan.tracked(target.tokenizer)
        recoveries = Recoveries(observation.recovered)
        ledger = Ledger(plan.judging.allowed, phases, recoveries, arrived)
        timings, prompt_length = ledger.timings, len(plan.prompt_token_ids)
        # A request with a deadline keeps trying until the visit enforces it.
        reopen_s = self._settings.reopen_timeout_s if visit.deadline is None else math.inf
        async with visit.slot(plan.max_total_tokens):
            with (
                experience.costs.shared(),
                closing(
                    Drafting(
                        fleet.drafters,
                        plan,
                        model,
                        ledger,
                        observation.correlation,
                        self._sharing_scope(caller),
                        self._settings.reopen_timeout_s,
                    )
                ) as drafting,
                closing(self._pace(plan, drafting, experience)) as pace,
                closing(
                    Verifying(
                        fleet.replicas_of(model, plan.judging.judge_fingerprint),
                        plan,
                        reopen_s,
                        ledger,
                        observation.correlation,
                    )
                ) as verifying,
            ):
                await verifying.reserve(plan.prompt_token_ids)
                visit.granted()
                timings.queue_ns = time.perf_counter_ns() - arrived
                drafter = drafting.assigned_name
                is_chat = isinstance(request.prompt, Chat)
                observation.admitted(plan, ledger, model.name, drafter, is_chat)
                yield plan.started(observation.request_id, model, drafter)
                trial = self._trial(drafting)

                def make_rounds() -> Rounds:
                    progress = Progress(plan, pace, drafting, verifying, ledger, phases)
                    return Rounds(progress, trial)

                long = is_long(plan.prompt_token_ids, plan.drafts.prediction)
                rounds = await in_turn(make_rounds) if long else make_rounds()
                async with aclosing(rounds.run()) as running:
                    async for round_ in running:
                        update = output.apply(round_.commands)
                        ended = output.finish_reason is not None
                        length = prompt_length + output.num_final_tokens
                        ledger.record(round_, update.final, length if ended else math.inf)
                        if kept is not None:
                            kept += update.final
                        observation.round(round_, update)
                        visit.used(length)
                        if reporting.return_rounds:
                            record = round_.record
                            if not reporting.return_draft_distributions:
                                record = replace(record, draft_distributions=())
                            yield record
                        for event in update.events:
                            if isinstance(event, Chunk) and not timings.time_to_first_token_ns:
                                timings.time_to_first_token_ns = time.perf_counter_ns() - arrived
                            yield event
                        if ended:
                            break
        if self._twins is not None and kept and not verifying.mixed_numerics:
            self._twins.consider(plan, target.info.model, kept)
        ledger.metrics.saved_ns = pace.saved_ns
        ledger.metrics.num_unrepeated_rounds = pace.num_unrepeated
        ledger.finish()
        timings.total_ns = time.perf_counter_ns() - arrived
        observation.completed(output, ledger)
        assert output.finish_reason is not None
        yield Completion(
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            prompt_tokens=prompt_length,
            completion_tokens=output.num_final_tokens,
            speculation=ledger.metrics,
            timings=timings,
            loop_guard_token_index=rounds.progress.loop_guard_index(output.num_final_tokens),
            recoveries=recoveries.kept,
            num_recoveries=recoveries.count,
            drafters=ledger.shares,
            num_draft_tokens_per_round=ledger.num_draft_tokens_per_round,
            mixed_numerics=verifying.mixed_numerics,
        )

    def _sharing_scope(self, caller: Caller) -> str:
        """Return whose outputs drafts may come from: those with the caller's key, or nobody's."""
        if caller.key is None or self._settings.draft_sharing != "key":
            return ""
        return hashlib.sha256(caller.key.name.encode()).hexdigest()[:32]

    async def check(self, request: GenerationRequest, caller: Caller = NOBODY) -> None:
        """Raise the `FlyspecError` with which a request would be refused for what it asks."""
        await self._checked(request, self._fleet.target, caller)

    async def _checked(
        self, request: GenerationRequest, target: Target, caller: Caller
    ) -> GenerationPlan:
        plan = await self._plan(request, target)
        check_tokens(caller.key, plan.max_total_tokens)
        self._fleet.drafters.check(plan.drafts.drafter)
        return plan

    async def score(
        self, request: ScoreRequest, caller: Caller = NOBODY
    ) -> AsyncGenerator[ScoredTokens, None]:
        """Yield a text's tokens with their log-probabilities, in pieces. Raises `FlyspecError`.

        Counts as a request, and takes a slot, like a generation.
        """
        with self._observer.request(caller) as observation:
            async with self._visit(caller) as visit:
                target = self._fleet.target
                options = GenerateOptions(logprobs=request.logprobs, max_tokens=1)
                plan = await self._plan(GenerationRequest(request.prompt, options), target)
                tokens = plan.prompt_token_ids
                check_tokens(caller.key, len(tokens))
                replicas = self._fleet.replicas_of(
                    target.info.model, plan.judging.judge_fingerprint
                )
                scoring = Scoring(replicas, plan, target, observation.correlation)
                async with visit.slot(len(tokens)), aclosing(scoring.run()) as pieces:
                    visit.granted()
                    async for piece in pieces:
                        visit.pause()
                        yield piece
                        visit.resume()

    def _experience(self, target: Target) -> Experience:
        """Return what generations with this target share for adapting the draft length."""
        known = self._learned
        if known is None or known[0] is not target:
            known = self._learned = target, Experience(target.info.step_costs)
            self._trials.clear()
        return known[1]

    def _pace(self, plan: GenerationPlan, drafting: Drafting, experience: Experience) -> Pace:
        """Choose how draft lengths are set: fixed, adaptive, or repeated from earlier rounds."""
        drafts = plan.drafts
        k, earlier = drafts.num_speculative_tokens, drafts.num_draft_tokens_per_round
        first = FirstToken(drafting.relative_size, len(plan.prompt_token_ids))
        at_once = bool(earlier) or not first.is_delayed(k)
        pace: Pace = FixedPace(k, at_once, first.may_share)
        if drafts.adaptive and k:
            pace = AdaptivePace(experience, plan, drafting.assigned_name, first)
        return RepeatedPace(earlier, pace, drafting.assigned_name) if earlier else pace

    def _trial(self, drafting: Drafting) -> StagingTrial | None:
        """Return what decides whether rounds are staged; None: never."""
        match self._settings.staging:
            case "off":
                return None
            case "on":
                return StagingTrial(always=True)
            case "auto":
                return self._trials[drafting.assigned_name]

    async def _plan(self, request: GenerationRequest, target: Target) -> GenerationPlan:
        """Check the request and plan the generation, in a thread if the prompt is long."""
        most, rules = self._fleet.max_draft_tokens, self._rules
        offer = self._fleet.offer(target)
        rest = target.tokenizer, offer, self._settings, most, rules
        if is_long(request.prompt, request.options.prediction):
            return await in_turn(partial(make_plan, request, *rest))
        return make_plan(request, *rest)

    @property
    def target(self) -> Target:
        return self._fleet.target

    @property
    def accepting(self) -> bool:
        """True if requests are accepted: a target works, and nothing is being drained."""
        return not self._admission.draining and bool(self._fleet.targets.usable)

    def arrive(self, caller: Caller) -> Visit:
        """Begin a request of which nothing was read yet; `end` the visit if it is not run.

        Raises `FlyspecError`.
        """
        try:
            return self._visit(caller)
        except FlyspecError as error:
            self.refuse(error, caller)

    def _visit(self, caller: Caller) -> Visit:
        """Return the visit with which the caller's request began, unless it was used before."""
        begun: Visit | None = caller.visit
        if begun is not None and not begun.entered:
            return begun
        return self._admission.visit(caller.client, caller.deadline, caller.key, caller.counted)

    def refuse(self, error: FlyspecError, caller: Caller = NOBODY) -> NoReturn:
        """Count a request that is not run, and raise `error`."""
        with self._observer.request(caller):
            raise error

    def models(self) -> Models:
        info = self._fleet.offer(self._fleet.target)
        drafters = tuple(drafter.name for drafter in self._fleet.drafters.all)
        return Models(
            info.model, drafters, tuple(self._rules.names(self._settings.rule, info.rules))
        )
