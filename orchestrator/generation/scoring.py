"""Scores a text: the target reads it as drafts that are all accepted (teacher forcing)."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from flyspec.prefix import TokenSequence
from flyspec.values.generation import ScoredTokens
from flyspec.values.rounds import VerifyRound
from orchestrator.fleet.target import Target
from orchestrator.fleet.target_replicas import TargetReplicas
from orchestrator.generation.ledger import Ledger
from orchestrator.generation.plan import GenerationPlan
from orchestrator.generation.verifying import Verifying
from orchestrator.upstreams.protocol import UNKNOWN, Correlation

REOPEN_TIMEOUT_S = 30.0


class Scoring:
    """Scores the prompt of `plan`, which sets the number of top log-probabilities."""

    def __init__(
        self,
        targets: TargetReplicas,
        plan: GenerationPlan,
        target: Target,
        correlation: Correlation = UNKNOWN,
    ) -> None:
        self._tokens = plan.prompt_token_ids
        # The session begins with the first token; the others are drafts.
        limits = replace(plan.limits, max_tokens=len(self._tokens))
        plan = replace(plan, prompt_token_ids=self._tokens[:1], limits=limits)
        self._verifying = Verifying(targets, plan, REOPEN_TIMEOUT_S, Ledger(), correlation)
        self._at_once = target.info.max_speculative_tokens
        self._detokenizer = target.tokenizer.detokenizer()
        self._bytes_of = target.tokenizer.bytes_of

    async def run(self) -> AsyncGenerator[ScoredTokens, None]:
        """Yield the tokens, in pieces. Raises `FlyspecError`."""
        tokens, verifying, push = self._tokens, self._verifying, self._detokenizer.push
        first, sequence = tokens[0], TokenSequence(tokens[:1])
        try:
            yield ScoredTokens([first], [push(first)])
            while rest := tokens[len(sequence) : len(sequence) + self._at_once]:
                round_ = VerifyRound(len(sequence), 0, (), rest, teacher_forced=True)
                async for verdict in verifying.check(sequence, round_):
                    if verdict is not None:
                        told = zip(rest, verdict.logprobs[: len(rest)], strict=True)
                        found = [e.spelled(token, self._bytes_of) for token, e in told]
                        verifying.keep(verdict.keep_length)  # what follows is not its next token
                        sequence.extend(rest)
                        texts = [push(token) for token in rest]
                        yield ScoredTokens(rest, texts, found)
        finally:
            verifying.close()
