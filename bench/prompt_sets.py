"""Named sets of prompts for comparisons: `--prompt-file NAME=FILE`, and what stands beside them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from flyspec.flags import Flag
from flyspec_lab.bench.prompts import DEFAULT_SEED, Group, groups
from flyspec_lab.bench.summaries import grouped

WORD_PROBLEMS, PYTHON = "word_problems", "python"
"""Sets that need no file, named like the corpora that heads learn from."""

NamedFiles = Sequence[tuple[str, str]]


def read_named(texts: Sequence[str]) -> NamedFiles:
    """Parse NAME=FILE texts. Raises `ValueError`."""
    found = []
    for text in texts:
        name, equals, file = text.partition("=")
        if not (name and equals and file):
            raise ValueError(f"{text!r}: must be NAME=FILE, such as humaneval=HumanEval.jsonl.gz")
        if name in (WORD_PROBLEMS, PYTHON):
            raise ValueError(f"{text!r}: {name!r} is a set that needs no file; choose another name")
        found.append((name, file))
    return tuple(found)


NamedPromptFiles = Annotated[NamedFiles, Flag(
    "A set of prompts and its file, of any format that `flyspec bench` reads; repeatable, also "
    "with the same name for several files.", name="--prompt-file", metavar="NAME=FILE",
    read=read_named, default="none",
)]  # fmt: skip


def files_by_set(named: NamedFiles) -> dict[str, list[str]]:
    """Return the files of each set, in the order of the sets' first appearance."""
    return {name: [file for _, file in of] for name, of in grouped(named, lambda n: n[0]).items()}


def file_group(name: str, files: Sequence[str], limit: int) -> Group:
    """Return about `limit` prompts of a set, evenly spaced in each of its files and categories.

    Raises `ConfigError` for a file without prompts.
    """
    parts = len(groups(files, 0, DEFAULT_SEED, 1))
    found = groups(files, 0, DEFAULT_SEED, max(1, limit // parts))
    return Group(name, [prompt for part in found for prompt in part.prompts])
