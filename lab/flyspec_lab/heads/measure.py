"""`flyspec heads measure`: loads target, head and draft model, and measures both on each corpus."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flyspec.bundled import DRAFT, EAGLE3, TARGET
from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.draft_heads.loading import load_head
from flyspec.errors import ConfigError
from flyspec.progress import progress, working
from flyspec.prompts import read_prompts
from flyspec.values.requests import Prompt
from flyspec_lab.heads.measuring import by_head, by_model, outputs, tokens_per_round
from flyspec_lab.heads.options import ALL_CORPORA, NO_CORPUS, HeadMeasureOptions
from flyspec_lab.local_model import LocalModel
from flyspec_lab.tasks import TASKS

_SLOTS = 32
_TASKS = {"word_problems": "word_problems", "python": "python_code"}
"""The task of each corpus: its problems are none that a head was trained on."""


@dataclass(frozen=True)
class Measured:
    """A drafter's tokens per round on a corpus, for each K; `tokens` of `texts` were emitted."""

    drafter: str
    corpus: str
    texts: int
    tokens: int
    tokens_per_round: tuple[float, ...]


@dataclass(frozen=True)
class HeadMeasurement:
    """What was measured, for these K."""

    k: tuple[int, ...]
    rows: tuple[Measured, ...]

    @property
    def document(self) -> Mapping[str, Any]:
        return asdict(self)


def measure(o: HeadMeasureOptions) -> HeadMeasurement:
    """Measure a head, and a draft model beside it. Raises `ConfigError`."""
    folder = Path(o.head).expanduser() if o.head else EAGLE3
    same: dict[str, Any] = {"device": o.device, "threads": o.threads}
    with working("loading the models"):
        target = LocalModel(
            VerifySettings(
                model=o.model or str(TARGET), dtype=o.dtype, max_sessions=_SLOTS, **same
            ),
            for_heads=True,
        )
        assert target.head_target is not None
        head = load_head(folder, target.head_target, 1)
        draft = None
        name = o.draft_model or (NO_CORPUS if o.model else str(DRAFT))
        if name != NO_CORPUS:
            draft = LocalModel(DraftSettings(model=name, max_sessions=1, **same))
    if draft and draft.info.tokenizer_fingerprint != target.info.tokenizer_fingerprint:
        raise ConfigError(
            f"--draft-model {draft.info.name}: its tokenizer differs from that of "
            f"{target.info.name}"
        )
    rows = []
    for corpus, prompts in _prompts(o):
        texts = outputs(target, [target.encode(prompt) for prompt in prompts], o.max_tokens)
        if not texts:
            raise ConfigError(f"{corpus}: the target writes nothing after its prompts")
        tokens = sum(len(text.token_ids) - text.prompt for text in texts)
        found = {f"{head.kind} {folder.name}": by_head(target, head, texts, max(o.k))}
        if draft is not None:
            found[draft.info.name] = by_model(draft, texts, max(o.k))
        for drafter, accepted in found.items():
            with progress(f"{corpus}, {drafter}", len(texts)) as advance:
                shares = tokens_per_round(accepted, o.k, advance)
            rows.append(Measured(drafter, corpus, len(texts), tokens, shares))
    return HeadMeasurement(o.k, tuple(rows))


def _prompts(o: HeadMeasureOptions) -> Iterable[tuple[str, list[Prompt]]]:
    corpora = ALL_CORPORA if o.corpora is None else o.corpora
    if not corpora and not o.data:
        raise ConfigError("--corpora and --data: give one of them, or there is nothing to measure")
    for name, own in corpora:
        task = TASKS[_TASKS[name]](limit=own or o.prompts, seed=o.seed)
        yield name, [problem.prompt for problem in task.problems()]
    for file in o.data:
        yield Path(file).name, [p.to_request() for p in read_prompts(file, o.prompts)]
