"""Records both models on a task's problems, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from flyspec.engine.distributions import round_off
from flyspec.errors import ConfigError
from flyspec.prefix import num_same
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.tokens import SamplingParams
from flyspec.version import __version__
from flyspec_lab.local_model import LocalModel
from flyspec_lab.tasks import Problem, Task
from flyspec_lab.tuning.recording import RecordedRound, RecordedText, TuningRecord, TuningRecordInfo
from verify_service.rules.criteria.entropy import entropy_nats
from verify_service.rules.guard import Guard

TOP_LOGITS = 64
"""Largest logits recorded a position. The rest is taken for uniform when it is replayed."""
MAX_GAP_NATS = 8.0
"""Mismatches that the target thinks this much less likely than its own token are not put in: no
sensible threshold accepts them. RuleReplay counts one that a rule accepts as an answer lost."""


@dataclass
class _Text:
    """A problem, its prompt, the target's own text, and how far rounds have come."""

    problem: Problem
    prompt: list[int]
    token_ids: list[int]
    score: float = np.nan
    at: int = 1  # the target decodes the first token while the drafter reads the prompt


@dataclass
class _Round:
    """A round while it is recorded: `said` has what both models say about it."""

    text: int
    start: int
    drafts: list[int]
    said: dict[str, np.ndarray] = field(default_factory=dict)
    fork_scores: dict[int, float] = field(default_factory=dict)


class Recorder:
    """Records prompts of a task, `num_speculative_tokens` drafts a round."""

    def __init__(
        self,
        target: LocalModel,
        draft: LocalModel,
        task: Task,
        num_speculative_tokens: int,
        max_tokens: int,
    ) -> None:
        if target.info.tokenizer_fingerprint != draft.info.tokenizer_fingerprint:
            raise ConfigError(
                f"{draft.info.name} has another tokenizer than {target.info.name}; thresholds are "
                "recorded with a draft model of the target's own"
            )
        self._target, self._draft, self._task = target, draft, task
        self._k, self._max_tokens = num_speculative_tokens, max_tokens
        self._spec = distribution_spec(resolve_rule(Rule("fuzzy")), SamplingParams())
        self._guard = Guard(target.bundle.control_token_ids, target.eos, ())

    def record(self, problems: Sequence[Problem], forks: bool = True) -> TuningRecord:
        """Record the problems. Raises `ConfigError` if one's texts cannot be scored.

        Without `forks` no mismatch is put in and no text is scored (NaN), which is enough for what
        both models say of the drafts.
        """
        with torch.inference_mode():
            texts = self._texts(problems)
            for text in texts if forks else ():
                text.score = self._score(text.problem, text.token_ids)
            rounds = self._rounds(texts)
            if forks:
                self._fork(texts, rounds)
        target, bundle = self._target.info, self._target.bundle
        return TuningRecord(
            TuningRecordInfo(
                target=target.name,
                target_fingerprint=target.weights_fingerprint,
                draft=self._draft.info.name,
                task=self._task.name,
                vocab_size=target.vocab_size,
                num_speculative_tokens=self._k,
                max_tokens=self._max_tokens,
                eos_token_ids=bundle.eos_token_ids,
                control_token_ids=bundle.control_token_ids,
                flyspec_version=__version__,
            ),
            [
                RecordedText(t.problem.prompt_id, len(t.prompt), len(t.token_ids), t.score)
                for t in texts
            ],
            [_recorded(r) for r in rounds],
        )

    def _texts(self, problems: Sequence[Problem]) -> list[_Text]:
        prompts = [self._target.encode(problem.prompt) for problem in problems]
        with progress("decoding the target's texts", len(prompts)) as advance:
            outputs = self._target.continued(prompts, [self._max_tokens] * len(prompts), advance)
        return list(map(_Text, problems, prompts, outputs))

    def _rounds(self, texts: Sequence[_Text]) -> list[_Round]:
        """Decode exactly, all texts side by side: each draws a round's drafts at a time."""
        rounds: list[_Round] = []
        total = sum(len(text.token_ids) for text in texts)
        with progress("drafting along them", total) as advance:
            while left := [i for i, t in enumerate(texts) if t.at < len(t.token_ids)]:
                before = [texts[i].prompt + texts[i].token_ids[: texts[i].at] for i in left]
                drafts = self._draft.continued(before, [self._k] * len(left))
                new = [_Round(i, texts[i].at, d) for i, d in zip(left, drafts, strict=True) if d]
                self._listen(new, [b + d for b, d in zip(before, drafts, strict=True) if d])
                rounds += new
                for i, proposed in zip(left, drafts, strict=True):
                    text = texts[i]
                    begin = text.at
                    same = num_same(proposed, text.token_ids[begin:])
                    text.at = min(begin + same + 1, len(text.token_ids))
                    advance(text.at - begin)
        return rounds

    def _listen(self, rounds: Sequence[_Round], sequences: Sequence[list[int]]) -> None:
        """Note what both models say about the drafts, which end the sequences."""
        counts = [len(round_.drafts) for round_ in rounds]
        rows = self._target.logits(sequences, [count + 1 for count in counts])
        for round_, logits in zip(rounds, rows, strict=True):
            round_.said |= _of_target(logits.float())
        assert self._spec is not None
        drawn = [sequence[:-1] for sequence in sequences]
        for round_, logits in zip(rounds, self._draft.logits(drawn, counts), strict=True):
            rounded = round_off(logits, self._spec)
            assert rounded.token_ids is not None
            round_.said["draft_log_probs"] = rounded.log_probs.numpy(force=True)
            round_.said["draft_ids"] = rounded.token_ids.numpy(force=True).astype(np.int32)

    def _fork(self, texts: Sequence[_Text], rounds: Sequence[_Round]) -> None:
        """Put in each mismatch that a rule might accept, and score what the target makes of it."""
        forks = [(round_, index) for round_ in rounds for index in self._mismatches(round_)]
        parts = [texts[r.text].token_ids[: r.start] + r.drafts[: index + 1] for r, index in forks]
        with progress("finishing after each mismatch", len(forks)) as advance:
            ends = self._target.continued(
                [texts[r.text].prompt + part for (r, _), part in zip(forks, parts, strict=True)],
                [max(0, self._max_tokens - len(part)) for part in parts],
                advance,
            )
        for (round_, index), part, end in zip(forks, parts, ends, strict=True):
            problem = texts[round_.text].problem
            round_.fork_scores[index] = self._score(problem, part + end)

    def _mismatches(self, round_: _Round) -> list[int]:
        """Indices of mismatches, up to the first that no rule accepts."""
        found = []
        logits, ids = round_.said["logits"], round_.said["logit_ids"]
        for index, draft in enumerate(round_.drafts):
            own = int(ids[index, 0])
            if draft == own:
                continue
            (place,) = np.nonzero(ids[index] == draft)
            likely = place.size and logits[index, 0] - logits[index, place[0]] <= MAX_GAP_NATS
            if not likely or not self._guard.allows(draft, own):
                break
            found.append(index)
        return found

    def _score(self, problem: Problem, token_ids: Sequence[int]) -> float:
        score = self._task.score(problem, self._target.tokenizer.decode(token_ids))
        if score is None:
            raise ConfigError(
                f"{self._task.name}: {problem.prompt_id} has no known answer; thresholds are tuned "
                "on prompts with answers"
            )
        return score.value


def _of_target(logits: Tensor) -> dict[str, np.ndarray]:
    top = logits.topk(min(TOP_LOGITS, logits.shape[-1]), dim=-1)
    return {
        "logits": top.values.numpy(force=True),
        "logit_ids": top.indices.numpy(force=True).astype(np.int32),
        "log_totals": logits.logsumexp(dim=-1).numpy(force=True),
        "entropies": entropy_nats(logits).numpy(force=True),
    }


def _recorded(round_: _Round) -> RecordedRound:
    scores = np.full(len(round_.drafts), np.nan, np.float32)
    for index, score in round_.fork_scores.items():
        scores[index] = score
    return RecordedRound(
        round_.text, round_.start, round_.drafts, fork_scores=scores, **round_.said
    )
