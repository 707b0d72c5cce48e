"""Steps of models: trees, hidden rows, and several tokens drawn in one call."""

import random
from functools import partial

import pytest
import torch

from flyspec.bundled import TARGET
from flyspec.draft_trees import paths
from flyspec.engine.loading import load_model
from flyspec.engine.model import Draw, History, Rows, Step
from flyspec.engine.native.library import find
from flyspec.engine.native.model import NativeModel
from flyspec.engine.runner import ModelRunner, Paging
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import Drafted, Origin, SamplingParams
from tests.engine.native_steps import SETS, native_model, needs_step, pairs, small_model
from tests.engine.random_models import eagerly, loaded_model, make_model, make_runner
from tests.scripted import ScriptedModel

LENGTH = 40
TREE = (0, 0, 1, 3, 3, 2, 6, 7, 0, 9, 8, 1)


def tokens(count, seed=0, vocabulary=41):
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(count)]


def random_tree(size, seed):
    draw = random.Random(seed)
    return tuple(draw.randint(max(0, index - 9), index) for index in range(size))


def chains(model, slot, prefix, step):
    """Return the rows [1 + drafts, vocab] of a tree, each computed as the end of a chain."""
    drafts = step.token_ids[step.num_chained :]
    texts = [prefix, *([*prefix, *(drafts[i] for i in path)] for path in paths(step.parents))]
    found = [model.forward([Step(slot, 0, text)])[0].logits.clone() for text in texts]
    return torch.cat(found)


def check_tree(model, parents, length, tolerance):
    """Compare a tree's rows with chains, in company, and go on from each of its paths.

    Without a `tolerance`, all bits must be the same.
    """
    prefix, drafts = tokens(length), tokens(len(parents), 1)
    step = Step(0, length - 3, [*prefix[-3:], *drafts], 1 + len(drafts), parents=parents)
    other = Step(2, 0, tokens(7, 2), 3)
    expected = chains(model, 1, prefix, step)

    def same(got, wanted):
        if tolerance is None:
            assert torch.equal(got, wanted)
        else:
            torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance)

    leads = paths(parents)
    for path in ([], leads[len(leads) // 2], max(leads, key=len)):
        model.forward([Step(0, 0, prefix[:-3], 0)])
        beside, rows = (each.logits for each in model.forward([other, step]))
        same(rows, expected)
        same(beside, model.forward([other])[0].logits)
        assert model.cache.held(0) == prefix
        kept = [drafts[i] for i in path]
        model.cache.keep_path(0, length, path, kept)
        assert model.cache.held(0) == [*prefix, *kept]
        end = tokens(3, 3)
        going_on = Step(0, length + len(path), end, 3)
        whole = Step(1, 0, [*prefix, *kept, *end], 3)
        same(model.forward([going_on])[0].logits.clone(), model.forward([whole])[0].logits)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("architecture", "kind", "changes"),
    [
        ("llama", "slots", {}),
        ("llama", "blocks", {}),
        ("mistral", "slots", {"sliding_window": 5}),
        ("gemma2", "blocks", {"sliding_window": 8}),
    ],
)
def test_rows_of_a_tree_are_those_of_chains(architecture, kind, changes):
    model = loaded_model(make_model(architecture, **changes))
    paging = Paging(16) if kind == "blocks" else None
    runner = ModelRunner(model, 3, paging=paging)
    assert not runner.tree_refusal
    for parents in (TREE, (0, 1, 2, 3), (0, 0, 0)):
        check_tree(runner, parents, LENGTH, 1e-9)


@needs_step
@pytest.mark.parametrize(
    ("case", "name"),
    pairs([("llama", 40, 1), ("qwen3", 63, 2), ("mistral", 64, 2), ("llama", 9, 2)]),
)
def test_the_native_step_gives_a_tree_the_bits_of_chains(case, name):
    architecture, length, threads = case
    model = native_model(small_model(architecture), name, threads=threads)
    for seed in range(2):
        check_tree(model, random_tree(12 + 7 * seed, seed), length + seed, None)


@needs_step
def test_a_large_tree_beside_long_work():
    """More rows than the native step runs at once, and work for several threads."""
    module = small_model(
        "llama", hidden_size=512, intermediate_size=1024, vocab_size=3000, head_dim=64,
        max_position_embeddings=900, initializer_range=0.06,
    )  # fmt: skip
    model = native_model(module, SETS[0], context_length=900, threads=2)
    parents = random_tree(30, 3)
    prefix, drafts = tokens(230), tokens(30, 1)
    step = Step(0, 0, [*prefix, *drafts], 31, parents=parents)
    (_, rows) = model.forward([Step(2, 0, tokens(500, 4), 1), step])
    assert torch.equal(rows.logits.clone(), chains(model, 1, prefix, step))


@needs_step
def test_hidden_rows_of_a_tree():
    model = native_model(small_model("llama"), SETS[0])
    prefix, drafts = tokens(20), tokens(len(TREE), 1)
    step = Step(0, 0, [*prefix, *drafts], 1, (1, -1), 1 + len(TREE), TREE)
    (rows,) = model.forward([step])
    for index, path in enumerate(paths(TREE)):
        text = [*prefix, *(drafts[i] for i in path)]
        (own,) = model.forward([Step(1, 0, text, 1, (1, -1), 1)])
        for layer in range(2):
            assert torch.equal(rows.hidden[layer][1 + index], own.hidden[layer][0])


def test_models_that_take_no_trees_say_so():
    runner = ModelRunner(loaded_model(make_model("llama")), 2, paging=Paging(16, attention="sdpa"))
    runner.accelerate(eagerly, compiled=False)
    assert "--block-size 0" in runner.tree_refusal
    with pytest.raises(ValueError, match="parents: steps over blocks"):
        runner.forward([Step(0, 0, [1, 2, 3], 3, parents=(0, 0))])


LAYERS = (3, 0)
"""Not sorted: they come in the requested order."""


def test_hidden_rows_equal_transformers():
    target, dtype = str(TARGET), "float64"
    model = load_model(target, "cpu", dtype).model
    last = model.config.num_hidden_layers
    runner = ModelRunner(load_model(target, "cpu", dtype), 3)
    texts = [[(11 * i * i + j) % 250 + 3 for i in range(40)] for j in range(3)]
    # Cached prefixes of two lengths, one of them with tokens that are rolled back; a whole prompt.
    runner.forward([Step(0, 0, texts[0][:25], 0), Step(2, 0, [*texts[2][:30], 7, 7, 7], 0)])
    steps = [Step(2, 30, texts[2][30:], 5), Step(1, 0, texts[1], 1), Step(0, 25, texts[0][25:], 15)]
    layers = (*LAYERS, last)
    found = runner.forward([step._replace(hidden_layers=layers) for step in steps])
    plain = runner.forward(steps)
    for step, rows, without in zip(steps, found, plain, strict=True):
        with torch.inference_mode():
            text = torch.tensor([texts[step.slot]])
            own = model(text, use_cache=False, output_hidden_states=True).hidden_states
        assert without.hidden == ()
        assert torch.equal(rows.logits, without.logits)
        assert len(rows.hidden) == len(layers)
        for layer, hidden in zip(layers, rows.hidden, strict=True):
            expected = own[layer][0, -step.num_logits :]
            assert hidden.shape == expected.shape
            if layer == 0:
                assert torch.equal(hidden, expected)
            scale = float(expected.abs().max())
            torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("kind", ["slots", "blocks", "fixed", "native"])
def test_hidden_rows_need_no_logits(kind):
    """A prompt's rows can be read without computing its logits."""
    loaded = load_model(str(TARGET), "cpu", "bfloat16" if kind == "native" else "float32")
    if kind == "native":
        if isinstance(library := find(), str):
            pytest.skip(library)
        runner = NativeModel(loaded, 2, library)
    else:
        paging = {"slots": None, "blocks": Paging(16), "fixed": Paging(16, attention="sdpa")}
        runner = ModelRunner(loaded, 2, paging=paging[kind])
        if kind == "fixed":
            runner.accelerate(eagerly, compiled=False)
            runner.cache.forget()
    # More rows than the native step runs at once.
    text = [(11 * i * i) % 250 + 3 for i in range(300)]
    layers, last = (2, -1), [*range(297, 300)]
    (whole,) = runner.forward([Step(0, 0, text, len(text), layers)])
    runner.cache.forget()
    whole = Rows(whole.logits.clone(), tuple(rows.clone() for rows in whole.hidden))
    steps = [Step(1, 0, text[:200], 0, layers, 200), Step(0, 0, text[::-1], 2)]
    first, other = runner.forward(steps)
    assert first.logits.shape[0] == 0
    assert other.hidden == ()
    found = [rows.clone() for rows in first.hidden]
    (rest,) = runner.forward([Step(1, 200, text[200:], 3, layers, 90)])
    close = partial(torch.testing.assert_close, rtol=0.02, atol=0.05 if kind == "native" else 1e-3)
    close(rest.logits, whole.logits[last])
    for rows, more, expected in zip(found, rest.hidden, whole.hidden, strict=True):
        assert (rows.shape[0], more.shape[0]) == (200, 90)
        close(rows, expected[:200])
        close(more, expected[210:])


def test_a_layer_that_there_is_not_is_refused():
    runner = ModelRunner(load_model(str(TARGET), "cpu", "float32"), 1)
    layers = runner.cache.kv_layers
    with pytest.raises(ValueError, match=f"between 0 and {len(layers)}"):
        runner.forward([Step(0, 0, [1], hidden_layers=(len(layers) + 1,))])


GREEDY = SamplingParams()
SAMPLED = SamplingParams(0.8, top_p=0.9)
PENALIZED = SamplingParams(0.9, repetition_penalty=1.5, presence_penalty=0.5, min_tokens=4)
PROMPTS = [[3, 4, 5, 6, 7, 8, 9], [11, 12], [21, 22, 23]]
EOS = 1


def draws(samplings, max_tokens):
    return [
        Draw(
            Step(slot, 0, prompt),
            sampling,
            seed=slot,
            history=History(prompt, len(prompt), [EOS]) if sampling.needs_history else None,
            distribution=DistributionSpec(4) if slot % 2 else None,
            max_tokens=max_tokens,
        )
        for slot, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]


def one_by_one(runner, draw):
    """The same draw, its tokens fed back by hand."""
    tokens, found = list(draw.step.token_ids), Drafted([], [], [])
    for _ in range(draw.max_tokens):
        fed = tokens[-1:] if found.token_ids else tokens
        history = draw.history and draw.history._replace(token_ids=list(tokens))
        step = Step(draw.step.slot, len(tokens) - len(fed), list(fed))
        (drawn,) = runner.draw([draw._replace(step=step, history=history, max_tokens=1)])
        found = Drafted(*([*a, *b] for a, b in zip(found, drawn, strict=True)))
        tokens += drawn.token_ids
    return found


@pytest.mark.parametrize("samplings", [[GREEDY] * 3, [SAMPLED] * 3, [PENALIZED, GREEDY, SAMPLED]])
def test_a_batch_of_sequences_draws_what_each_draws_step_by_step(samplings):
    model = make_model("llama")
    together = make_runner(model).draw(draws(samplings, 9))
    for draw, found in zip(draws(samplings, 9), together, strict=True):
        expected = one_by_one(make_runner(model), draw)
        assert (found.token_ids, found.origins) == (expected.token_ids, expected.origins)
        assert found.origins == [Origin.EXACT_MODEL] * 9
        assert [q.token_ids for q in found.distributions] == [
            q.token_ids for q in expected.distributions
        ]
        assert len(found.distributions) == (9 if draw.distribution else 0)


def test_sequences_end_by_themselves_and_leave_the_batch():
    model = ScriptedModel()
    wants = [
        Draw(Step(0, 0, [3]), GREEDY, max_tokens=6),
        Draw(Step(1, 0, [3]), GREEDY, max_tokens=6, stop_token_ids={5}),
        Draw(Step(2, 0, [9]), GREEDY, max_tokens=1),
        Draw(Step(3, 0, [1, 2, 3], 0), None),
    ]
    found = [list(drawn.token_ids) for drawn in model.draw(wants)]
    assert found == [[4, 5, 6, 7, 8, 9], [4, 5], [10], []]
    assert [len(steps) for steps in model.calls] == [4, 2, 1, 1, 1, 1]
    # The last token drawn was not run.
    assert model.cache.held(0) == [3, 4, 5, 6, 7, 8]


def test_a_model_describes_itself():
    one, two = (make_runner(make_model("llama")) for _ in range(2))
    assert one.bytes_per_token == 0
    one.forward([Step(0, 0, [1, 2])])
    assert one.bytes_per_token == 2 * one.cache.kv_layers[0].rows[0][0].nbytes * len(
        one.cache.kv_layers
    )
    single = make_runner(make_model("llama", dtype=torch.float32))
    for runner in (one, two, single):
        runner.warm_up()
    assert one.info.numerics == two.info.numerics != single.info.numerics
    assert one.info.numerics.startswith("float64, transformers ")
