"""`flyspec heads measure`: how many of the target's own greedy tokens a head or a draft model has.

It needs no services. The target's text is what `exact` emits whatever is drafted, so the rounds of
every K follow from the drafts after each of its tokens: a round emits the drafted tokens that are
the text's, and the one after them. Drafts of K tokens begin those of more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyspec.bundled import DRAFT, EAGLE3, TARGET
from flyspec.config import DraftSettings, VerifySettings
from flyspec.engine.draft_heads.base import DraftHead, HeadStep
from flyspec.engine.draft_heads.loading import load_head
from flyspec.errors import ConfigError
from flyspec.prefix import num_same
from flyspec.progress import progress, working
from flyspec.prompts import read_prompts
from flyspec.values.requests import Prompt
from flyspec_lab.heads.options import ALL_CORPORA, NO_CORPUS, HeadMeasureOptions
from flyspec_lab.heads.texts import LearntText
from flyspec_lab.local_model import LocalModel
from flyspec_lab.tasks import TASKS

_SLOTS = 32
_TASKS = {"word_problems": "word_problems", "python": "python_code"}
"""The task of each corpus: its problems are none that a head was trained on."""
Accepted = list[int]
"""For each of a text's output tokens but the last, how many drafts after it are right."""


@dataclass(frozen=True)
class Measured:
    """A drafter's tokens per round on a corpus, for each K; `tokens` of `texts` were emitted."""

    drafter: str
    corpus: str
    texts: int
    tokens: int
    tokens_per_round: tuple[float, ...]


def measure(o: HeadMeasureOptions) -> list[Measured]:
    """Measure a head on each corpus, and a draft model beside it. Raises `ConfigError`."""
    folder = Path(o.head).expanduser() if o.head else EAGLE3
    same: dict[str, Any] = {"device": o.device, "threads": o.threads}
    with working("loading the models"):
        settings = VerifySettings(
            model=o.model or str(TARGET), dtype=o.dtype, max_sessions=_SLOTS, **same
        )
        target = LocalModel(settings, for_heads=True)
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
        tokens = sum(len(text.token_ids) - text.first for text in texts)
        found = {f"{head.kind} {folder.name}": by_head(target, head, texts, max(o.k))}
        if draft is not None:
            found[draft.info.name] = by_model(draft, texts, max(o.k))
        for drafter, accepted in found.items():
            with progress(f"{corpus}, {drafter}", len(texts)) as advance:
                shares = tokens_per_round(accepted, o.k, advance)
            rows.append(Measured(drafter, corpus, len(texts), tokens, shares))
    return rows


def _prompts(o: HeadMeasureOptions) -> Iterable[tuple[str, list[Prompt]]]:
    corpora = ALL_CORPORA if o.corpora is None else o.corpora
    if not corpora and not o.data:
        raise ConfigError("--corpora and --data: give one of them, or there is nothing to measure")
    for name, own in corpora:
        task = TASKS[_TASKS[name]](limit=own or o.prompts, seed=o.seed)
        yield name, [problem.prompt for problem in task.problems()]
    for file in o.data:
        yield Path(file).name, [p.to_request() for p in read_prompts(file, o.prompts)]


def outputs(
    target: LocalModel, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[LearntText]:
    """Return the prompts with the target's greedy output, where it has two tokens."""
    found = target.continued(prompts, [max_tokens] * len(prompts))
    return [LearntText([*p, *o], len(p)) for p, o in zip(prompts, found, strict=True) if len(o) > 1]


def by_head(
    target: LocalModel, head: DraftHead, texts: Sequence[LearntText], most: int
) -> Iterator[Accepted]:
    """Yield how many of a head's drafts are right in each text."""
    for text in texts:
        tokens = text.token_ids
        (read,) = target.rows([tokens[:-1]], [len(tokens) - 1], head.hidden_layers)
        hidden = [rows.clone() for rows in read.hidden]
        head.forget(0)
        accepted, at = [], 0
        for end in range(text.first, len(tokens) - 1):  # drafts follow the token at `end`
            rows = tuple(each[at:end] for each in hidden)
            wanted = min(most, head.max_tokens, len(tokens) - 1 - end)
            turn = HeadStep(0, at, rows, tokens[at + 1 : end + 1], wanted)
            (drafted,) = head.draft([turn])
            accepted.append(num_same(drafted.token_ids, tokens[end + 1 :]))
            at = end
        yield accepted


def by_model(draft: LocalModel, texts: Sequence[LearntText], most: int) -> Iterator[Accepted]:
    """Yield how many of a draft model's drafts are right in each text."""
    for text in texts:
        tokens = text.token_ids
        starts = range(text.first + 1, len(tokens))
        drafted = draft.continued(
            [tokens[:start] for start in starts],
            [min(most, len(tokens) - start) for start in starts],
        )
        yield [num_same(d, tokens[start:]) for d, start in zip(drafted, starts, strict=True)]


def tokens_per_round(
    found: Iterable[Accepted], k: Sequence[int], advance: Callable[[], None] = lambda: None
) -> tuple[float, ...]:
    """Return the mean tokens of a round, the target's own one included, for each K.

    A round drafts no more than what is left of its text.
    """
    rounds, emitted = dict.fromkeys(k, 0), dict.fromkeys(k, 0)
    for accepted in found:
        for most in k:
            at = 0
            while at < len(accepted):
                own = min(accepted[at], most)
                # The text's last token may be a draft, and then no other follows it.
                emitted[most] += min(own + 1, len(accepted) - at)
                rounds[most] += 1
                at += own + 1
        advance()
    return tuple(emitted[most] / max(rounds[most], 1) for most in k)
