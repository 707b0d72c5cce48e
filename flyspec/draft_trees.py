"""Trees of drafts: drafts with second choices, one of whose paths is judged. Pure, no torch.

A tree is given by the row that each draft follows: row 0 is the last token of the sequence, row i
the i-th draft. So a draft's own row is its index plus 1, and a draft follows an earlier row. Drafts
without parents are a chain, as are those whose parents are 0, 1, 2, ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from flyspec.errors import InvalidArgumentError

Parents = Sequence[int]
"""The row that each draft follows; empty: a chain."""


def check_parents(name: str, parents: Parents, num_drafts: int) -> None:
    """Raise `InvalidArgumentError` unless `parents` make a tree of so many drafts, or are empty."""
    if not parents:
        return
    if len(parents) != num_drafts:
        raise InvalidArgumentError(
            f"{name} has {len(parents)} entries for {num_drafts} drafts; send one per draft, or "
            "none for a chain"
        )
    for index, parent in enumerate(parents):
        if not 0 <= parent <= index:
            raise InvalidArgumentError(
                f"{name}[{index}] is {parent}, but draft {index} can only follow row 0, the last "
                f"token of the sequence, or the row of an earlier draft, 1 to {index}"
            )


def depths(parents: Parents) -> list[int]:
    """Return how many tokens behind the sequence's last one each draft is, from 1 on."""
    rows = [0]
    for parent in parents:
        rows.append(rows[parent] + 1)
    return rows[1:]


def children(parents: Parents) -> list[list[int]]:
    """Return the indices of the drafts that follow each row, in order."""
    found: list[list[int]] = [[] for _ in range(len(parents) + 1)]
    for index, parent in enumerate(parents):
        found[parent].append(index)
    return found


def paths(parents: Parents) -> list[list[int]]:
    """Return the indices of the drafts that lead to each draft, its own last."""
    found: list[list[int]] = []
    for index, parent in enumerate(parents):
        found.append([*(found[parent - 1] if parent else ()), index])
    return found


def main_path(parents: Parents) -> list[int]:
    """Return the indices of the first draft, the first one that follows it, and so on."""
    following, path = children(parents), list[int]()
    while branches := following[path[-1] + 1 if path else 0]:
        path.append(branches[0])
    return path


def behind(root: int, links: Iterable[tuple[int, int]]) -> set[int]:
    """Return `root` and all that follows it, directly or not.

    `links` are numbers, each with the number that it follows, which does not come after it.
    """
    found = {root}
    for number, followed in links:
        if followed in found:
            found.add(number)
    return found
