"""A target that reads recorded tokens, and judges recorded rounds again.

Each round is a forward, as it was when the text was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flyspec.config import VerifySettings
from flyspec.engine.autojudge import HIDDEN_LAYER, AutoJudge, read_judge
from flyspec.engine.distributions import decode
from flyspec.engine.model import History, Step
from flyspec.errors import InvalidArgumentError
from flyspec.prefix import num_same
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.validation import common_distribution_spec
from flyspec.values.generation import Recording
from flyspec.values.rounds import Verdict
from flyspec_lab.audit.retelling import RetoldRound
from flyspec_lab.local_model import LocalModel
from verify_service.rules import decide_all, prepare
from verify_service.rules.inquiry import PendingVerdict
from verify_service.warm_target import fitted

_EXACT = Rule("exact")


class ReadRound(NamedTuple):
    """A round with the target's raw logits: [tokens read + 1, V], valid until the next is read.

    `hidden` [tokens read + 1, hidden size] are the rows that a judge reads, if there is one.
    """

    round: RetoldRound
    rows: Tensor
    hidden: Tensor | None = None


@dataclass
class AuditedTarget:
    """A model that reads one sequence at a time, and the judge that it was recorded with."""

    local: LocalModel
    prefill_chunk: int = 512
    autojudge: AutoJudge | None = None

    @classmethod
    def load(cls, settings: VerifySettings) -> Self:
        """Load it as the verify service does, so that it has the same bits (`LocalModel`).

        Raises `ConfigError`.
        """
        local, file = LocalModel(settings), settings.autojudge_file
        judge = fitted(read_judge(Path(file).expanduser()), local.model, file) if file else None
        return cls(local, settings.prefill_chunk, judge)

    def read(self, rounds: Sequence[RetoldRound]) -> Iterator[ReadRound]:
        """Yield the rounds with their logits.

        Raises `InvalidArgumentError` for tokens that the target cannot read.
        """
        self._check_tokens(rounds)
        slot = self.local.model.cache.acquire().slot
        try:
            for round_ in rounds:
                yield self._forward(slot, round_)
        finally:
            self.local.model.cache.release(slot)

    def judge(self, recording: Recording, read: ReadRound) -> Verdict | Exception:
        """Judge a round as it was judged, from the recorded state; plain tokens by `exact`.

        Returns the error of a round that cannot be judged instead of a verdict. Raises
        `InvalidArgumentError` if it needs a judge and there is none.
        """
        rules = recording.started.rules_by_index
        if self.autojudge is None and any(RULE_PRESETS[rule.name].hidden_layers for rule in rules):
            raise InvalidArgumentError(
                f"{recording.started.rules}: needs the judge that it was recorded with; give its "
                "file as --autojudge-file"
            )
        try:
            pending = self._prepare(recording, *read)
        except InvalidArgumentError as error:
            return error
        (verdict,) = decide_all([pending])
        return verdict

    def _prepare(
        self, recording: Recording, round_: RetoldRound, rows: Tensor, hidden: Tensor | None
    ) -> PendingVerdict:
        started, record = recording.started, round_.record
        rules = started.rules_by_index if record.draft_token_ids else (_EXACT,)
        spec = common_distribution_spec(rules, started.sampling)
        draft = None
        if record.draft_distributions:
            draft = decode(
                record.draft_distributions,
                record.draft_token_ids,
                self.local.info.vocab_size,
                renormalise=spec is not None and spec.draw_from_it,
                device=rows.device,
            )
        return prepare(
            rules[0],
            round_.read_token_ids,
            rows,
            sampling=started.sampling,
            seed=started.seed,
            start_position=len(round_.prefix),
            eos_token_ids=self.local.eos.union(started.stop_token_ids),
            control_token_ids=self.local.bundle.control_token_ids,
            budget=record.budget,
            exact_until_position=record.exact_until_position,
            open_window=record.open_window,
            num_speculative_tokens=record.num_speculative_tokens,
            draft_distributions=draft,
            other_rules=rules[1:],
            rule_segments=record.rule_segments if record.draft_token_ids else (),
            hidden_rows=hidden,
            autojudge=self.autojudge,
            history=History(round_.prefix, len(started.prompt_token_ids), self.local.eos),
        )

    def _check_tokens(self, rounds: Sequence[RetoldRound]) -> None:
        info = self.local.info
        for index, round_ in enumerate(rounds):
            new = round_.prefix[-1:] if index else round_.prefix
            if (largest := max([*new, *round_.read_token_ids])) >= info.vocab_size:
                raise InvalidArgumentError(
                    f"token id {largest} is out of range: {info.name} has ids 0 to "
                    f"{info.vocab_size - 1}; audit against the target that the recording names"
                )
            if len(round_.prefix) + len(round_.read_token_ids) > info.context_length:
                raise InvalidArgumentError(
                    f"the recording is longer than the context of {info.name}, "
                    f"{info.context_length} tokens; raise --max-model-len, or audit against the "
                    "target that it names"
                )

    @torch.inference_mode()
    def _forward(self, slot: int, round_: RetoldRound) -> ReadRound:
        tokens = [*round_.prefix, *round_.read_token_ids]
        first_row = len(round_.prefix) - 1
        start = min(num_same(self.local.model.cache.held(slot), tokens), first_row)
        while first_row - start > self.prefill_chunk:
            piece = tokens[start : start + self.prefill_chunk]
            self.local.model.forward([Step(slot, start, piece, 0)])
            start += len(piece)
        layers = (HIDDEN_LAYER,) if self.autojudge else ()
        count = len(round_.read_token_ids) + 1
        (rows,) = self.local.model.forward([Step(slot, start, tokens[start:], count, layers)])
        return ReadRound(round_, rows.logits, rows.hidden[0] if layers else None)
