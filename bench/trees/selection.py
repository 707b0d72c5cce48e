"""Which drafts make a tree: selection by expected acceptance, and how far a text follows it. Pure.

A tree is the set of its nodes, and a node the tokens that lead to it: `(5,)` and `(5, 7)` are a
chain of two. A path's beginnings are in the tree too. A node's value is the estimated probability
that the target's text goes through it, as a logarithm; the nodes of largest value promise most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from heapq import heappop, heappush, nlargest, nsmallest
from itertools import islice
from typing import NamedTuple

Path = tuple[int, ...]


class Candidates(NamedTuple):
    """Tokens that may come next, most likely first, and their log-probabilities."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]


class Drafts(NamedTuple):
    """A round's tree, and the rows of each step of the draft model that made it."""

    paths: Sequence[Path]
    draft_steps: Sequence[int] = ()


Selection = Generator[Sequence[Path], Sequence[Candidates], Drafts]
"""Yields paths, is sent what the draft model says after each, and returns the tree."""


def num_followed(paths: Collection[Path], text: Sequence[int]) -> int:
    """Return how many tokens of a text are in the tree: those that exact verification accepts."""
    count = 0
    while count < len(text) and tuple(text[: count + 1]) in paths:
        count += 1
    return count


def chain(token_ids: Sequence[int]) -> list[Path]:
    """Return the tree that is one chain."""
    return [tuple(token_ids[: i + 1]) for i in range(len(token_ids))]


def leaves(paths: Iterable[Path]) -> list[Path]:
    """Return the paths that no other continues, in order."""
    paths = list(paths)
    inner = {path[:-1] for path in paths}
    return [path for path in paths if path not in inner]


def best(values: Mapping[Path, float], count: int) -> list[Path]:
    """Return the nodes of largest value, at most `count`; of equal ones, the shallower.

    They are a tree if no node is worth more than its parent.
    """
    return nsmallest(count, values, key=lambda path: (-values[path], len(path)))


def chain_values(chains: Iterable[tuple[Sequence[int], float]]) -> dict[Path, float]:
    """Return the values, as logarithms, of several chains' nodes, given the chance of their tokens.

    What several chains share is worth what it is by the surest of them.
    """
    values: dict[Path, float] = {}
    for token_ids, chance in chains:
        for depth, path in enumerate(chain(token_ids), 1):
            values[path] = max(values.get(path, -math.inf), depth * math.log(chance))
    return values


def dynamic_tree(
    num_nodes: int,
    width: int,
    stops: Collection[int] = (),
    others: Mapping[Path, float] | None = None,
) -> Selection:
    """Select EAGLE-2's tree (arXiv 2406.16858, section 4) of at most `num_nodes` drafts.

    Level by level, the `width` nodes of largest value, the product of the draft model's
    probabilities, are expanded to all their candidates; of all nodes, those of largest value stay.
    The paper expands to a fixed depth. Here, a node is not expanded if it would not stay, since
    its descendants would not either; so the tree is the same as at any greater depth, in fewer
    steps. Nothing follows one of `stops`. `others` are nodes that the tree may have anyway.
    """
    values = dict(others or {})
    kept = best(values, num_nodes)
    level: list[Path] = [()] if num_nodes else []
    steps: list[int] = []
    while level:
        steps.append(len(level))
        for path, (token_ids, logprobs) in zip(level, (yield level), strict=True):
            value = values.get(path, 0.0)
            for token, logprob in zip(token_ids, logprobs, strict=True):
                node = (*path, token)
                values[node] = max(values.get(node, -math.inf), value + logprob)
        kept, depth = best(values, num_nodes), len(steps)
        nodes = (path for path in kept if len(path) == depth and path[-1] not in stops)
        level = list(islice(nodes, width)) if depth < num_nodes else []
    return Drafts(kept, steps)


def ranked_tree(
    num_nodes: int,
    candidates: Callable[[Path], Sequence[tuple[int, float]]],
    stops: Collection[int] = (),
) -> list[Path]:
    """Return the best tree if every path's candidates are known with their chances in (0, 1).

    Best first: Medusa builds its static tree so from measured accuracies (arXiv 2401.10774,
    section 2.3.2), there by depth and rank.
    """
    tree: list[Path] = []
    queue: list[tuple[float, int, Path]] = [(0.0, 0, ())]
    while queue and len(tree) < num_nodes:
        cost, depth, path = heappop(queue)
        if path:
            tree.append(path)
        if path and path[-1] in stops:
            continue
        for token, chance in candidates(path):
            heappush(queue, (cost - math.log(chance), depth + 1, (*path, token)))
    return tree


def trie(num_nodes: int, others: Mapping[Path, float], stops: Collection[int] = ()) -> Selection:
    """Select the best nodes of other chains, with their values, and the draft model's chain.

    The model draws as long as its next token may be among the best.
    """
    values, value, steps = dict(others), 0.0, 0
    drawn: Path = ()
    while len(drawn) < num_nodes and not (drawn and drawn[-1] in stops):
        if value <= min(nlargest(num_nodes, values.values())[num_nodes - 1 :], default=-math.inf):
            break
        ((token_ids, logprobs),) = yield [drawn]
        steps += 1
        drawn, value = (*drawn, token_ids[0]), value + logprobs[0]
        values[drawn] = max(values.get(drawn, -math.inf), value)
    return Drafts(best(values, num_nodes), [1] * steps)


def best_chain(
    num_nodes: int,
    chains: Iterable[tuple[Sequence[int], float]],
    stops: Collection[int] = (),
) -> Selection:
    """Select the chain that promises most: one of others, or the draft model's, by the same values.

    Other chains are given with their tokens' chance, and continued by the model if they are short.
    The model stops drawing its own once that cannot become the best.
    """
    guesses = [(sum(p**i for i in range(1, len(t) + 1)), tuple(t)) for t, p in chains if t]
    most, guess = max(guesses, default=(0.0, ()))
    path: Path = ()
    promised, value, steps = 0.0, 0.0, 0
    while len(path) < num_nodes and not (path and path[-1] in stops):
        if promised + (num_nodes - len(path)) * math.exp(value) <= most:
            break
        ((token_ids, logprobs),) = yield [path]
        path, value, steps = (*path, token_ids[0]), value + logprobs[0], steps + 1
        promised += math.exp(value)
    if most > promised:
        path = guess
        while len(path) < num_nodes and path[-1] not in stops:
            ((token_ids, _),) = yield [path]
            path, steps = (*path, token_ids[0]), steps + 1
    return Drafts(chain(path), [1] * steps)
