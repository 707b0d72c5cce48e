"""A recording: all that replay needs, in one file, made by running both models once.

It has the target's text of each prompt, in rounds of exact decoding with K drafts. A round has the
drafts, what both models say about each of them, and for each mismatch that a rule might accept the
score of the text that the target writes after it: the mismatch is put in, and the target finishes
greedily. That is how AutoJudge labels mismatches (arXiv 2504.20039); here the drafts before it
stand, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from flyspec.engine.distributions import round_off
from flyspec.errors import ConfigError
from flyspec.prefix import num_same
from flyspec.progress import progress
from flyspec.rules import Rule
from flyspec.rules.resolve import resolve_rule
from flyspec.validation import distribution_spec
from flyspec.values.tokens import SamplingParams
from flyspec_lab.tasks import Problem, Task
from verify_service.rules.guard import Guard

if TYPE_CHECKING:
    from flyspec_lab.local_model import LocalModel

VERSION = 2
TOP_LOGITS = 64
"""Largest logits recorded a position. The rest is taken for uniform when it is replayed."""
MAX_GAP_NATS = 8.0
"""Mismatches that the target thinks this much less likely than its own token are not put in: no
sensible threshold accepts them. RuleReplay counts one that a rule accepts as an answer lost."""
Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class RecordedText:
    """The target's own text, `num_tokens` long, and its score, from 0 to 1."""

    prompt_length: int
    num_tokens: int
    score: float


@dataclass(frozen=True)
class RecordedRound:
    """A round of n drafts at index `start` of text number `text`.

    `logits` and `logit_ids` [n + 1, k]: the target's largest raw logits, in order. `log_totals`
    [n + 1]: logsumexp of all raw logits. `draft_log_probs` and `draft_ids` [n, m]: the draft's most
    likely tokens. `fork_scores` [n]: the score of the text after a mismatch was put in, NaN where
    none was.
    """

    text: int
    start: int
    draft_token_ids: list[int]
    logits: Floats
    logit_ids: Ids
    log_totals: Floats
    draft_log_probs: NDArray[np.float16]
    draft_ids: Ids
    fork_scores: Floats


_OF_POSITIONS = "logits", "logit_ids", "log_totals"
_OF_DRAFTS = "draft_log_probs", "draft_ids", "fork_scores"


@dataclass(frozen=True)
class TuningRecordInfo:
    """Models, task and settings of a recording."""

    target: str
    target_fingerprint: str
    draft: str
    task: str
    vocab_size: int
    num_speculative_tokens: int
    max_tokens: int
    eos_token_ids: Sequence[int]
    control_token_ids: Sequence[int]


@dataclass(frozen=True)
class TuningRecord:
    """The rounds of all texts, in the order in which they were made."""

    info: TuningRecordInfo
    texts: Sequence[RecordedText]
    rounds: Sequence[RecordedRound]

    @property
    def num_positions(self) -> int:
        """Positions at which the target's logits are recorded."""
        return sum(len(r.log_totals) for r in self.rounds)

    def save(self, path: Path) -> None:
        """Write it as a compressed file of NumPy's."""
        arrays: dict[str, Any] = {
            name: np.concatenate([getattr(r, name) for r in self.rounds])
            for name in (*_OF_POSITIONS, *_OF_DRAFTS)
        }
        meta = {
            "version": VERSION,
            "info": asdict(self.info),
            "texts": [asdict(text) for text in self.texts],
            "rounds": [(r.text, r.start, r.draft_token_ids) for r in self.rounds],
        }
        with path.open("wb") as file:
            np.savez_compressed(file, meta=np.array(json.dumps(meta)), **arrays)

    @classmethod
    def load(cls, path: Path) -> TuningRecord:
        """Read one. Raises `ConfigError` if the file is none, or of another version."""
        try:
            with np.load(path) as file:
                meta = json.loads(str(file["meta"]))
                arrays = {name: file[name] for name in (*_OF_POSITIONS, *_OF_DRAFTS)}
            version = meta["version"]
        except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ConfigError(f"{path}: cannot be read as a recording: {error}") from None
        if version != VERSION:
            raise ConfigError(
                f"{path}: of version {version}, this flyspec reads {VERSION}; record again"
            )
        counts = np.array([len(drafts) for _, _, drafts in meta["rounds"]])
        parts: dict[str, Any] = {
            name: np.split(rows, np.cumsum(counts + (name in _OF_POSITIONS))[:-1])
            for name, rows in arrays.items()
        }
        rounds = [
            RecordedRound(*head, **{name: of[i] for name, of in parts.items()})
            for i, head in enumerate(meta["rounds"])
        ]
        texts = [RecordedText(**text) for text in meta["texts"]]
        return cls(TuningRecordInfo(**meta["info"]), texts, rounds)


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
        target = self._target
        with torch.inference_mode():
            prompts = [target.encode(problem.prompt) for problem in problems]
            with progress("decoding the target's texts", len(prompts)) as advance:
                outputs = target.continued(prompts, [self._max_tokens] * len(prompts), advance)
            texts = [
                RecordedText(
                    len(prompt), len(output), self._score(problem, output) if forks else np.nan
                )
                for problem, prompt, output in zip(problems, prompts, outputs, strict=True)
            ]
            rounds = self._rounds(prompts, outputs)
            if forks:
                self._fork(problems, prompts, outputs, rounds)
        info = TuningRecordInfo(
            target=target.info.name,
            target_fingerprint=target.info.weights_fingerprint,
            draft=self._draft.info.name,
            task=self._task.name,
            vocab_size=target.info.vocab_size,
            num_speculative_tokens=self._k,
            max_tokens=self._max_tokens,
            eos_token_ids=list(target.bundle.eos_token_ids),
            control_token_ids=list(target.bundle.control_token_ids),
        )
        return TuningRecord(info, texts, rounds)

    def _rounds(
        self, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
    ) -> list[RecordedRound]:
        """Decode exactly, all texts side by side: each draws a round's drafts at a time."""
        rounds: list[RecordedRound] = []
        # The target decodes the first token while the drafter reads the prompt.
        ends = [1] * len(outputs)
        with progress("drafting along them", sum(map(len, outputs))) as advance:
            while left := [i for i, output in enumerate(outputs) if ends[i] < len(output)]:
                before = [prompts[i] + outputs[i][: ends[i]] for i in left]
                drafts = self._draft.continued(before, [self._k] * len(left))
                found = zip(left, drafts, before, strict=True)
                rounds += self._described([(i, ends[i], own, ids) for i, own, ids in found if own])
                for i, own in zip(left, drafts, strict=True):
                    begin = ends[i]
                    same = num_same(own, outputs[i][begin:])
                    ends[i] = min(begin + same + 1, len(outputs[i]))
                    advance(ends[i] - begin)
        return rounds

    def _described(
        self, rounds: Sequence[tuple[int, int, list[int], list[int]]]
    ) -> list[RecordedRound]:
        """Return rounds as both models see them: text, start, drafts, and the sequence before."""
        assert self._spec is not None
        counts = [len(drafts) for _, _, drafts, _ in rounds]
        sequences = [before + drafts for _, _, drafts, before in rounds]
        target = self._target.rows(sequences, [count + 1 for count in counts])
        drawn = self._draft.rows([sequence[:-1] for sequence in sequences], counts)
        found = []
        for (text, start, drafts, _), raw, own in zip(rounds, target, drawn, strict=True):
            rows = raw.logits.float()
            top = rows.topk(min(TOP_LOGITS, rows.shape[-1]), dim=-1)
            rounded = round_off(own.logits, self._spec)
            assert rounded.token_ids is not None
            found.append(
                RecordedRound(
                    text,
                    start,
                    drafts,
                    logits=top.values.numpy(force=True),
                    logit_ids=top.indices.numpy(force=True).astype(np.int32),
                    log_totals=rows.logsumexp(dim=-1).numpy(force=True),
                    draft_log_probs=rounded.log_probs.numpy(force=True),
                    draft_ids=rounded.token_ids.numpy(force=True).astype(np.int32),
                    fork_scores=np.full(len(drafts), np.nan, np.float32),
                )
            )
        return found

    def _fork(
        self,
        problems: Sequence[Problem],
        prompts: Sequence[list[int]],
        outputs: Sequence[list[int]],
        rounds: Sequence[RecordedRound],
    ) -> None:
        """Put in each mismatch that a rule might accept, and score what the target makes of it."""
        forks = [(round_, index) for round_ in rounds for index in self._mismatches(round_)]
        parts = [outputs[r.text][: r.start] + r.draft_token_ids[: index + 1] for r, index in forks]
        with progress("finishing after each mismatch", len(forks)) as advance:
            ends = self._target.continued(
                [prompts[r.text] + part for (r, _), part in zip(forks, parts, strict=True)],
                [max(0, self._max_tokens - len(part)) for part in parts],
                advance,
            )
        for (round_, index), part, end in zip(forks, parts, ends, strict=True):
            round_.fork_scores[index] = self._score(problems[round_.text], part + end)

    def _mismatches(self, round_: RecordedRound) -> list[int]:
        """Indices of mismatches, up to the first that no rule accepts."""
        found = []
        logits, ids = round_.logits, round_.logit_ids
        for index, draft in enumerate(round_.draft_token_ids):
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
