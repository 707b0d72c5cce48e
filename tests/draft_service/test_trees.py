"""Trees of drafts: which nodes they have, and that a session stays in order around them."""

import math
import random
import struct

import pytest

from draft_service.drafters.retrieval import token_recycling
from draft_service.drafters.trees import add_chain, add_choices, best, drafted, grow
from draft_service.proposal import SessionState, propose
from draft_service.server import offered
from flyspec.draft_trees import depths
from flyspec.engine.loop import Ran
from flyspec.lookup.shared import Scopes
from flyspec.values.rounds import DistributionSpec, DraftAdvance, DraftChunk, DraftOpen, TopTokens
from flyspec.values.tokens import Origin, TokenDistribution
from tests.draft_service.draft_harness import EOS, GREEDY, CountingRunner
from tests.tiny import CONTEXT_LENGTH

MODEL, LOOKUP = Origin.EXACT_MODEL, Origin.EXACT_LOOKUP


def test_the_best_nodes_of_several_chains():
    nodes = {}
    add_chain(nodes, [1, 2, 3], [0.5, 0.5, 0.5], LOOKUP)
    add_chain(nodes, [1, 4], [0.9, 0.3], MODEL)
    add_chain(nodes, [7], [0.05], LOOKUP)
    assert best(nodes, 4) == [(1,), (1, 4), (1, 2), (1, 2, 3)]
    found = drafted(nodes, 4)
    assert found.token_ids == [1, 4, 2, 3]
    assert found.parents == [0, 1, 1, 3]
    assert found.origins == [MODEL, MODEL, LOOKUP, LOOKUP]
    assert found.confidences == pytest.approx([0.9, 0.3, 0.5, 0.5])
    assert drafted(nodes, 2).parents == ()
    assert drafted(nodes, 4, min_confidence=0.26).token_ids == [1, 4, 2]


def test_other_choices_of_the_model():
    nodes = {}
    add_chain(nodes, [5, 6], [1.0, 0.5], MODEL)
    listed = struct.pack("<2e", math.log(0.5), math.log(0.25))
    add_choices(nodes, [5, 6], [TokenDistribution(listed, (6, 8))], MODEL)
    assert best(nodes, 9) == [(5,), (5, 6), (5, 8)]
    assert nodes[5, 8].chance == pytest.approx(0.25, rel=1e-3)


def test_a_tree_of_candidates_of_candidates():
    after = {(): [(1, 0.6), (2, 0.3)], (1,): [(3, 0.5)], (2,): [(4, 0.9)]}
    nodes = grow(4, 2, lambda path: after.get(path, ()), LOOKUP)
    assert list(nodes) == [(1,), (2,), (1, 3), (2, 4)]
    assert list(grow(9, 1, lambda path: after.get(path, ()), LOOKUP)) == [(1,), (2,)]


def proposed(state, runner, advance):
    """Return the answer to an advance."""
    found = []
    work, drawn = propose(state, advance, 64, 0, found.append), None
    while True:
        try:
            draw = next(work) if drawn is None else work.send(Ran(drawn, 0, 0))
        except StopIteration:
            break
        (drawn,) = runner.draw([draw])
    (chunk,) = found
    assert isinstance(chunk, DraftChunk)
    return chunk


def test_recycled_candidates_make_a_tree():
    drafter = token_recycling(Scopes())
    assert drafter.info.makes_trees
    session = drafter.open(DraftOpen([1, 2], GREEDY, 0))
    state = SessionState(lambda: session)
    # After 2 (behind 1): 3 or 4; after 3 (behind 2): 5 or 6; after 4 (behind 2): 7 or 8.
    top = TopTokens([1, 2, 3, 4], [3, 4, 5, 6, 7, 8], [0, 0])
    chunk = proposed(state, None, DraftAdvance(1, 2, [], 2, top_tokens=[top], max_tree_tokens=5))
    assert chunk.token_ids[:3] == [3, 4, 5]
    assert chunk.parents[:3] == [0, 0, 1]
    assert len(chunk.token_ids) == 5
    assert max(depths(chunk.parents)) == 2
    # The tree is not part of the sequence, of which the next request keeps what it appends.
    assert session.token_ids == [1, 2]
    chunk = proposed(state, None, DraftAdvance(2, 2, [4, 7], 2, max_tree_tokens=5))
    assert (chunk.keep_length, chunk.next_token_id, chunk.token_ids) == (3, 7, [])


def test_sessions_of_the_composed_drafter_stay_in_order(loaded):
    runner = CountingRunner(loaded, 2)
    drafters = {d.info.name: d for d in offered(runner, (EOS,), None, CONTEXT_LENGTH)}
    draw = random.Random(0)
    text = [draw.randrange(3, 250) for _ in range(12)] * 2
    states = {
        name: SessionState(lambda name=name: drafters[name].open(DraftOpen(text, GREEDY, 0)))
        for name in ("model", "composed")
    }
    keep, append = len(text), list[int]()
    for round_id in range(1, 7):
        advance = DraftAdvance(round_id, keep, append, 6)
        chain = proposed(states["model"], runner, advance).token_ids
        tree = proposed(
            states["composed"], runner, DraftAdvance(round_id, keep, append, 6, max_tree_tokens=12)
        )
        held = keep + len(append)
        if tree.parents:
            assert states["composed"].session().token_ids == [*text[:keep], *append][:held]
        elif MODEL in tree.origins:
            assert tree.token_ids[:1] == chain[:1]
        assert len(tree.token_ids) <= 12
        text = [*text[:keep], *append, *chain[:2], 77]
        keep, append = held, [*chain[:2], 77]


def test_sessions_that_send_distributions_make_chains(loaded):
    runner = CountingRunner(loaded, 1)
    drafters = {d.info.name: d for d in offered(runner, (EOS,), None, CONTEXT_LENGTH)}
    open_ = DraftOpen([5, 6, 7], GREEDY, 0, distribution=DistributionSpec(4))
    state = SessionState(lambda: drafters["composed"].open(open_))
    chunk = proposed(state, runner, DraftAdvance(1, 3, [], 4, max_tree_tokens=8))
    assert not chunk.parents
    assert len(chunk.distributions) == len(chunk.token_ids) == 4
