"""`bench.trees`: what makes a tree, and how many tokens a round brings, against restatements."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.trees.drafting import (
    BestChains,
    Chains,
    Clock,
    ModelTrees,
    RecycledTrees,
    RoundCosts,
    SideBySide,
    Tries,
)
from bench.trees.gains import SetRounds, SizedMethod, gain_at_equal_rows, gain_at_equal_time
from bench.trees.reading import Reader
from bench.trees.rounds import TextTally, simulate, verdict
from bench.trees.selection import (
    Candidates,
    Drafts,
    Path,
    Selection,
    best_chain,
    chain,
    chain_values,
    dynamic_tree,
    leaves,
    num_followed,
    ranked_tree,
    trie,
)
from draft_service.drafters.model import ModelDrafter
from flyspec.bundled import DRAFT, TARGET
from flyspec.config import DraftSettings, VerifySettings
from flyspec.lab.local_model import LocalModel
from flyspec.values.chat import Chat
from flyspec.word_problems import problems

STOP = 0


def says(path: Path, tokens: int = 4) -> Candidates:
    """Return a made-up model's candidates after a path, none as likely as another."""
    weights = [1.0 + ((sum(path) * 7 + len(path) * 5 + token * 3) % 11) for token in range(tokens)]
    ranked = sorted(range(tokens), key=lambda token: -weights[token] - token / 100)
    return Candidates(ranked, [math.log(weights[t] / (sum(weights) + 1)) for t in ranked])


def drive(selection: Selection) -> Drafts:
    asked = None
    try:
        asked = next(selection)
        while True:
            asked = selection.send([says(path) for path in asked])
    except StopIteration as end:
        return end.value


def value(path: Path) -> float:
    """Return the probability of a path, token by token."""
    found = 1.0
    for depth, token in enumerate(path):
        before = says(path[:depth])
        found *= math.exp(before.logprobs[list(before.token_ids).index(token)])
    return found


@pytest.mark.parametrize("num_nodes", [0, 1, 2, 5, 12])
def test_a_wide_dynamic_tree_has_the_likeliest_of_all_paths(num_nodes: int) -> None:
    every = [p for n in range(1, 6) for p in itertools.product(range(4), repeat=n)]
    allowed = [path for path in every if STOP not in path[:-1]]
    expected = sorted(map(value, allowed), reverse=True)[:num_nodes]
    paths, steps = drive(dynamic_tree(num_nodes, 99, {STOP}))
    assert sorted(map(value, paths), reverse=True) == pytest.approx(expected)
    assert len(steps) <= num_nodes
    assert all(path[:-1] in paths for path in paths if len(path) > 1)


def test_a_dynamic_tree_expands_as_many_nodes_per_level_as_it_may() -> None:
    paths, steps = drive(dynamic_tree(12, 1))
    assert set(steps) == {1}
    expanded = {path[:-1] for path in paths}
    assert len(expanded) == len({len(path) for path in expanded})


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=4), st.data())
def test_a_text_follows_a_tree_as_far_as_it_is_in_it(drafts, data) -> None:
    paths = {path for draft in drafts for path in chain(draft)}
    text = data.draw(st.lists(st.integers(0, 2), max_size=6))
    expected = max(
        (n for d in drafts for n in range(len(d) + 1) if d[:n] == text[:n] and n <= len(text)),
        default=0,
    )
    assert num_followed(paths, text) == expected
    ends = leaves(paths)
    assert {p for end in ends for p in chain(end)} == paths
    assert not any(a != b and b[: len(a)] == a for a in ends for b in ends)


def test_a_ranked_tree_takes_the_best_by_their_chances() -> None:
    def candidates(path: Path) -> list[tuple[int, float]]:
        return [(1, 0.6), (2, 0.3)] if len(path) < 3 else []

    def chance(path: Path) -> float:
        return math.prod({1: 0.6, 2: 0.3}[token] for token in path)

    every = [p for n in (1, 2, 3) for p in itertools.product((1, 2), repeat=n)]
    tree = ranked_tree(6, candidates)
    worst = min(map(chance, tree))
    assert len(tree) == 6
    assert all(chance(path) <= worst + 1e-9 for path in every if path not in tree)
    assert all(path[:-1] in tree for path in tree if len(path) > 1)
    assert ranked_tree(9, candidates, {1, 2}) == [(1,), (2,)]


def test_a_trie_has_the_best_nodes_of_all_chains() -> None:
    chains = [([3, 3, 1], 0.5), ([3, 2], 0.9)]
    paths, steps = drive(trie(4, chain_values(chains)))
    drawn: list[int] = []
    for _ in range(4):
        drawn.append(says(tuple(drawn)).token_ids[0])
    values = {path: value(path) for path in chain(drawn)}
    for tokens, chance in chains:
        for path in chain(tokens):
            values[path] = max(values.get(path, 0.0), chance ** len(path))
    best = sorted(values.values(), reverse=True)[:4]
    assert sorted((values[path] for path in paths), reverse=True) == pytest.approx(best)
    assert len(steps) <= 4
    sure = [([1, 2, 3, 1], 0.99)]
    assert drive(trie(4, chain_values(sure))) == (
        [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 1)], [1],
    )  # fmt: skip


def test_the_best_chain_is_the_one_that_promises_most() -> None:
    sure = drive(best_chain(4, [([2, 2], 0.9), ([1, 1, 1, 1], 0.1)]))
    assert sure.paths[:2] == [(2,), (2, 2)]
    assert len(sure.paths) == 4  # the model went on
    unsure = drive(best_chain(4, [([2, 2], 0.01)]))
    assert unsure.paths[0] == (says(()).token_ids[0],)
    assert unsure.draft_steps == [1] * 4


def tally(tokens: int, rounds: int, *ns: float) -> TextTally:
    return TextTally(tokens, rounds, 0, 0, list(ns))


def test_gains_compare_the_best_of_both_sides() -> None:
    found = SetRounds(
        "set",
        ["a", "b"],
        {
            SizedMethod("c", 4): [tally(20, 10, 10e6)] * 2,
            SizedMethod("c", 8): [tally(20, 8, 20e6)] * 2,
        },
        {
            SizedMethod("t", 4): [tally(20, 8, 10e6), tally(20, 12, 10e6)],
            SizedMethod("t", 8): [tally(20, 5, 40e6), tally(20, 8, 40e6)],
        },
    )
    rows = gain_at_equal_rows(found)
    assert (rows.tree, rows.chain) == ("t, 8 rows", "c, 8 rows")
    assert rows.gain == pytest.approx(16 / 13 - 1)
    assert [text.place for text in rows.texts] == ["b", "a"]
    time = gain_at_equal_time(found, 0, 0.0)
    assert (time.tree, time.chain, time.gain) == ("t, 4 rows", "c, 4 rows", 0.0)


@pytest.fixture(scope="module")
def pair() -> tuple[LocalModel, LocalModel]:
    return (
        LocalModel(VerifySettings(model=str(TARGET), threads=1, max_sessions=4)),
        LocalModel(DraftSettings(model=str(DRAFT), threads=1, max_sessions=4)),
    )


@pytest.fixture(scope="module")
def read(pair) -> tuple[list[list[int]], list[list[int]]]:
    target, _ = pair
    prompts = [target.encode(Chat.of_user(p.question)) for p in problems(7, 2)]
    return prompts, target.continued(prompts, [24, 24])


def test_a_reader_says_what_a_fresh_forward_does(pair, read) -> None:
    target, _ = pair
    prompts, texts = read
    text = texts[1]
    odd = (text[5], 9, 9, 7)
    with Reader(target, prompts, texts, 3).open() as reader:
        places = [(1, 5, odd), (1, 5, (text[5], 9, 8)), (1, 2, (4, 4)), (0, 0, (8,)), (1, 24, (6,))]
        reader.load(places)
        reader.load([(1, 12, (3,)), (1, 6, (9, 9, 5))])
        for index, position, path in [*places, (1, 12, (3,)), (1, 6, (9, 9, 5)), (0, 7, ())]:
            for length in range(len(path) + 1):
                ids = [*prompts[index], *texts[index][:position], *path[:length]]
                (row,) = target.logits([ids], [1])
                found = reader.after(index, position, path[:length])
                assert list(found.token_ids) == row[-1].topk(3).indices.tolist()


@pytest.mark.parametrize("method", [ModelTrees, RecycledTrees, Tries, BestChains])
def test_rounds_bring_the_text(pair, read, method) -> None:
    target, draft = pair
    prompts, texts = read
    costs = [RoundCosts(lambda rows: 10.0 + rows, lambda rows: 2.0 * rows, 5.0)]
    with (
        Reader(target, prompts, texts, 8).open() as said,
        Reader(draft, prompts, texts, 8).open() as own,
    ):
        batch = SideBySide(prompts, texts, target.eos)
        tallies = simulate(method(batch, own), 4, said, costs)
    for found, text in zip(tallies, texts, strict=True):
        assert found.tokens == len(text)
        assert len(text) / 4 <= found.rounds <= len(text)
        assert found.rows <= 4 * found.rounds
        least = found.rounds * 15 + found.rows
        assert found.ns[0] >= least + 2 * found.draft_steps


def test_a_models_rounds_are_those_of_its_own_continuations(pair, read) -> None:
    """Restated: draft from every round's start, and count what equals the text."""
    target, draft = pair
    prompts, texts = read
    costs = [RoundCosts(float, float, 5.0)]
    expected = []
    for prompt, text in zip(prompts, texts, strict=True):
        done = rounds = 0
        while done < len(text):
            (drafted,) = draft.continued([[*prompt, *text[:done]]], [3])
            same = 0
            while same < 3 and drafted[same : same + 1] == text[done + same : done + same + 1]:
                same += 1
            done, rounds = done + same + 1, rounds + 1
        expected.append(rounds)
    with Reader(target, prompts, texts, 8).open() as said:
        method = Chains(
            SideBySide(prompts, texts, target.eos),
            ModelDrafter(draft.model, tuple(draft.eos)),
            draft.model,
            Clock(),
            costs[0],
        )
        tallies = simulate(method, 4, said, costs)
        method.close()
    assert [each.rounds for each in tallies] == expected


def test_what_the_target_says_of_rejected_drafts_is_learned(pair, read) -> None:
    target, _ = pair
    prompts, texts = read
    with Reader(target, prompts, texts, 8).open() as reader:
        batch = SideBySide(prompts, texts, target.eos)
        wrong, right = (9, 8), (texts[0][0],)
        drafts = Drafts([right, wrong[:1], wrong])
        reader.load((0, 0, path) for path in leaves(drafts.paths))
        tops = verdict(reader, batch, 0, drafts, texts[0][:2])
        assert [top.context_token_ids for top in tops] == [
            [*prompts[0][-2:], *wrong], [*prompts[0][-2:], *right],
        ]  # fmt: skip
        for top, path in zip(tops, (wrong, right), strict=True):
            (rows,) = target.logits([[*prompts[0], *path]], [len(path) + 1])
            assert top.token_ids == rows.topk(8).indices.flatten().tolist()
