"""Drafts that make a tree: those that the target's text most likely goes through. Pure.

A node is the path of tokens that leads to it: `(5,)` and `(5, 7)` are a chain of two. Its value is
the estimated probability that the text goes through it, and no node is worth more than the one that
it follows, so that the best nodes are a tree.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from heapq import heappop, heappush, nsmallest
from typing import NamedTuple

from flyspec.values.tokens import Drafted, Origin, TokenDistribution

Path = tuple[int, ...]
Candidates = Callable[[Path], Iterable[tuple[int, float]]]
"""Returns the tokens that may follow a path, with their chances in (0, 1)."""


class Node(NamedTuple):
    """A node's value, its token's chance given the path to it, and where the token comes from."""

    value: float
    chance: float
    origin: Origin


Nodes = dict[Path, Node]


def add_chain(
    nodes: Nodes, token_ids: Sequence[int], chances: Sequence[float], origin: Origin
) -> None:
    """Add a chain, whose tokens have these chances. A node of two chains is worth the greater."""
    value = 1.0
    for end, chance in enumerate(chances, 1):
        path, value = tuple(token_ids[:end]), value * chance
        known = nodes.get(path)
        if known is None or value > known.value:
            nodes[path] = Node(value, chance, origin)


def add_choices(
    nodes: Nodes, chain: Sequence[int], choices: Sequence[TokenDistribution], origin: Origin
) -> None:
    """Add the other tokens that might stand in the place of each of the last tokens of a chain.

    There is a list of them for each of these.
    """
    first = len(chain) - len(choices)
    for index, (log_probs, token_ids) in enumerate(choices, first):
        above = tuple(chain[:index])
        value = nodes[above].value if above else 1.0
        for token, logprob in zip(token_ids, struct.iter_unpack("<e", log_probs), strict=True):
            chance, path = math.exp(logprob[0]), (*above, token)
            known = nodes.get(path)
            if known is None or known.value < value * chance:
                nodes[path] = Node(value * chance, chance, origin)


def grow(count: int, max_depth: int, candidates: Candidates, origin: Origin) -> Nodes:
    """Return the best tree of `count` nodes, the best first.

    Medusa builds its static tree so from measured accuracies (arXiv 2401.10774, section 2.3.2).
    """
    nodes: Nodes = {}
    queue: list[tuple[float, int, float, Path]] = [(-1.0, 0, 1.0, ())]
    while queue and len(nodes) < count:
        negative, depth, chance, path = heappop(queue)
        if path:
            nodes[path] = Node(-negative, chance, origin)
        if depth < max_depth:
            for token, chance in candidates(path):
                heappush(queue, (negative * chance, depth + 1, chance, (*path, token)))
    return nodes


def best(nodes: Mapping[Path, Node], count: int) -> list[Path]:
    """Return the nodes of greatest value, at most `count`, each after what it follows.

    Of those that follow the same one, the likeliest comes first: a rule that accepts other tokens
    than the target's own judges that one.
    """
    return nsmallest(count, nodes, key=lambda path: (-nodes[path].value, len(path)))


def drafted(nodes: Mapping[Path, Node], count: int, min_confidence: float = 0.0) -> Drafted:
    """Return the best `count` nodes as drafts; a chain if they are one.

    Nothing follows a node whose value is below `min_confidence`.
    """
    paths = [
        path
        for path in best(nodes, count)
        if len(path) == 1 or nodes[path[:-1]].value >= min_confidence
    ]
    rows: dict[Path, int] = {(): 0}
    parents = []
    for row, path in enumerate(paths, 1):
        parents.append(rows[path[:-1]])
        rows[path] = row
    return Drafted(
        [path[-1] for path in paths],
        [nodes[path].origin for path in paths],
        confidences=[nodes[path].chance for path in paths],
        parents=() if parents == [*range(len(parents))] else parents,  # () for a chain
    )
