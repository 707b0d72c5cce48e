"""Named groups of prompts, from files or freshly generated."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from flyspec.errors import ConfigError
from flyspec.prompts import Prompt, read_prompts
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.statistics import grouped
from flyspec_lab.word_problems import word_problems

DEFAULT_PROBLEMS = 20
RANDOM_LENGTHS = (16, 256)
"""Shortest and longest prompt of random tokens."""

# Spec-Bench's categories from MT-bench; the others are separate data sets.
_MT_BENCH = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)


@dataclass(frozen=True)
class Group:
    """Prompts reported together."""

    name: str
    prompts: Sequence[Prompt]


def groups_of(o: SpeedOptions) -> list[Group]:
    """Return fresh problems, and each file's prompts by category, `limit` of each evenly spaced.

    Raises `ConfigError` if `prediction` is asked for and a prompt has none.
    """
    default = 0 if o.prompt_file or o.random_prompts else DEFAULT_PROBLEMS
    problems = default if o.problems is None else o.problems
    found = []
    if problems:
        found.append(Group("word problems", word_problems(problems, o.problem_seed)))
    stems = [Path(name).name.partition(".")[0] or name for name in o.prompt_file]
    for name, stem in zip(o.prompt_file, stems, strict=True):
        label = stem if stems.count(stem) == 1 else name
        by_category = grouped(
            read_prompts(name), lambda p: "mt" if p.category in _MT_BENCH else p.category
        )
        for category, prompts in by_category.items():
            count = min(len(prompts), o.limit or len(prompts))
            spread = [prompts[i * len(prompts) // count] for i in range(count)]
            found.append(Group(f"{label}/{category}" if category else label, spread))
    lacking = next((p for group in found for p in group.prompts if not p.prediction), None)
    if o.prediction and lacking:
        raise ConfigError(f"--prediction: {lacking.where} has none; give files of prompts with one")
    return found


def random_tokens(count: int, target: str, seed: int) -> Group:
    """Draw prompts from a target's vocabulary, special tokens excluded.

    Their continuation is next to impossible to draft. `target` is the model's directory; raises
    `ConfigError` if it has no `tokenizer.json`.
    """
    path = Path(target).expanduser() / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"--random-prompts draws from {path}, which does not exist")
    tokenizer = Tokenizer.from_file(str(path))
    added = tokenizer.get_added_tokens_decoder()
    ids = sorted(set(tokenizer.get_vocab(with_added_tokens=True).values()) - set(added))
    rng = random.Random(seed)
    prompts = []
    for i in range(count):
        token_ids = tuple(rng.choices(ids, k=rng.randint(*RANDOM_LENGTHS)))
        where = f"random prompt {i} of seed {seed}"
        prompts.append(Prompt("", "token_ids", None, where, token_ids=token_ids))
    return Group("random tokens", prompts)


def in_turn(sizes: Sequence[int], repeat: int) -> list[tuple[int, int]]:
    """Order (group, prompt), given the groups' sizes, so that each group is spread evenly.

    So a machine whose speed drifts slows all groups alike. Each repeat starts with another group.
    """
    places = [
        ((i + 0.5) / size, (g - repeat) % len(sizes), g, i)
        for g, size in enumerate(sizes)
        for i in range(size)
    ]
    return [(g, i) for _, _, g, i in sorted(places)]
