"""The native step: close to float32, and each row's bits depend only on its own sequence."""

import copy
import random
from itertools import pairwise

import pytest
import torch

from flyspec.engine import stepwise
from flyspec.engine.cache_table import Copy
from flyspec.engine.model import Draw, Interrupt, Step
from flyspec.engine.sampling import keyed_noise, row_keys
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from tests.engine.native_steps import (
    SETS,
    SHAPES,
    compiled,
    native_model,
    needs_step,
    pairs,
    small_model,
)
from tests.engine.random_models import reference_logits

pytestmark = needs_step

LENGTH = 70
GREEDY = SamplingParams()


def tokens(count, seed=0, vocabulary=41):
    draw = random.Random(seed)
    return [draw.randrange(vocabulary) for _ in range(count)]


def one_by_one(model, slot, ids, start=0):
    """Return [tokens, vocab], one token per step."""
    steps = [Step(slot, start + i, [token]) for i, token in enumerate(ids)]
    return torch.cat([model.forward([step])[0].logits for step in steps])


@pytest.mark.parametrize(("shape", "name"), pairs(SHAPES))
def test_it_is_nearer_to_float32_than_the_module_in_bfloat16(shape, name):
    module, ids = small_model(shape), tokens(LENGTH)
    (rows,) = native_model(module, name).forward([Step(1, 0, ids, LENGTH)])
    exact = reference_logits(copy.deepcopy(module).float(), ids)
    own = float((reference_logits(module, ids).float() - exact).abs().mean())
    assert rows.logits.dtype == torch.float32
    assert exact.std() > 0.3  # else nothing would show
    assert float((rows.logits - exact).abs().mean()) < 1.1 * own
    assert float((rows.logits - exact).abs().max()) < 0.1 * float(exact.abs().max())


@pytest.mark.parametrize(("shape", "name"), pairs(["llama", "qwen3", "mistral"]))
def test_a_row_has_the_same_bits_in_any_company(shape, name):
    module, ids = small_model(shape), tokens(LENGTH)
    model = native_model(module, name, threads=2)
    alone = one_by_one(native_model(module, name), 0, ids)
    for cuts in ((0, LENGTH), (0, 1, 3, 8, 37, LENGTH), (0, 33, 50, LENGTH)):
        for first, last in pairwise(cuts):
            # In another slot, behind a neighbour, and before one.
            before, after = (
                Step(1, 0, tokens(first % 7 + 1, 3)),
                Step(2, 0, tokens(last % 9 + 1, 4)),
            )
            step = Step(3, first, ids[first:last], last - first)
            _, rows, _ = model.forward([before, step, after])
            assert torch.equal(rows.logits, alone[first:last])
    for count in (1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 32, 33):
        (rows,) = model.forward([Step(3, 30, ids[30 : 30 + count], count)])
        assert torch.equal(rows.logits, alone[30 : 30 + count])


@pytest.mark.parametrize("name", SETS)
def test_work_shared_by_threads_gives_the_same_bits(name, monkeypatch):
    """Large enough to be split among threads, with more rows than the model takes at once."""
    module = small_model(
        "llama", hidden_size=512, intermediate_size=1024, vocab_size=3000, head_dim=64,
        max_position_embeddings=700, initializer_range=0.06,
    )  # fmt: skip
    ids = tokens(600, vocabulary=3000)
    one, two, six = (native_model(module, name, context_length=700, threads=n) for n in (1, 2, 6))
    (expected,) = one.forward([Step(0, 0, ids, len(ids))])
    for model in [two, *[six] * 5]:  # on few cores, helpers are put aside again and again
        (rows,) = model.forward([Step(1, 0, ids, len(ids))])
        assert torch.equal(rows.logits, expected.logits)
        for first, last in ((400, 433), (300, 317), (290, 291)):
            (rows,) = model.forward([Step(1, first, ids[first:last], last - first)])
            assert torch.equal(rows.logits, expected.logits[first:last])


@pytest.mark.parametrize("name", [*dict.fromkeys([*SETS[:1], *SETS[-1:]])])
def test_long_contexts(name):
    module = small_model("llama", max_position_embeddings=4200)
    ids = tokens(4130)
    model = native_model(module, name, 2, 4200)
    (whole,) = model.forward([Step(0, 0, ids, len(ids))])
    exact = reference_logits(copy.deepcopy(module).float(), ids)
    assert float((whole.logits - exact).abs().mean()) < 0.02 * float(exact.std())
    # Pieces cut elsewhere, then single steps.
    for first, last in pairwise((0, 511, 1023, 2047, 3001, 4096)):
        model.forward([Step(1, first, ids[first:last], 0)])
    assert torch.equal(one_by_one(model, 1, ids[4096:], 4096), whole.logits[4096:])


@pytest.mark.parametrize("name", SETS)
def test_copies_and_rollbacks(name):
    module, ids = small_model("qwen2"), tokens(LENGTH)
    model = native_model(module, name)
    expected = one_by_one(native_model(module, name), 0, ids)
    for length in (1, 31, 63, 64, 65):
        model.forward([Step(0, 0, ids[:length], 0)])
        model.cache.pending_copies.append(Copy(0, 2, length))
        # The copy goes before the step that overwrites its source.
        steps = [Step(0, 0, tokens(40, 9)), Step(2, length, ids[length:], LENGTH - length)]
        assert torch.equal(model.forward(steps)[1].logits, expected[length:])
        for start in (40, 17, 16, 3):
            model.forward([Step(2, start, tokens(20, start), 0)])
            (rows,) = model.forward([Step(2, start, ids[start:], LENGTH - start)])
            assert torch.equal(rows.logits, expected[start:])


def test_hidden_rows_are_those_of_the_module():
    module, ids = small_model("llama"), tokens(20)
    model = native_model(module, SETS[0])
    with torch.inference_mode():
        exact = module.float()(torch.tensor([ids]), output_hidden_states=True).hidden_states
    steps = [Step(0, 0, ids, 5, (0, 2)), Step(1, 0, ids[:7], 1, (1,))]
    one, other = model.forward(steps)
    for layer, rows in ((0, one.hidden[0]), (2, one.hidden[1])):
        torch.testing.assert_close(rows, exact[layer][0, -5:], atol=0.1, rtol=0.1)
    assert torch.equal(one.hidden[0], exact[0][0, -5:])
    torch.testing.assert_close(other.hidden[0], exact[1][0, 6:7], atol=0.05, rtol=0.05)
    with pytest.raises(ValueError, match="3 is not between 0 and 2"):
        model.forward([Step(0, 0, ids, 1, (3,))])


# --- draws -------------------------------------------------------------------------------------


def draws(**changes):
    prompts = [tokens(9, 1), tokens(2, 2), tokens(31, 3)]
    wants = [Draw(Step(i, 0, ids), GREEDY, max_tokens=12) for i, ids in enumerate(prompts)]
    return [want._replace(**changes) for want in wants]


def check_draws(model, wants):
    """They are what is drawn step by step."""
    asked = [want._replace(confidences=True) for want in wants]
    expected = stepwise.draw(model.forward, asked)
    held = [model.cache.held(slot) for slot in range(4)]
    found = model.draw(wants)
    assert [model.cache.held(slot) for slot in range(4)] == held
    for one, other in zip(found, expected, strict=True):
        assert [list(part) for part in one[:3]] == [list(part) for part in other[:3]]
        assert one.confidences == pytest.approx(other.confidences, rel=1e-4)


@pytest.mark.parametrize("name", SETS)
def test_many_steps_in_a_call_are_the_same_steps_one_by_one(name):
    model = native_model(small_model("llama"), name)
    stop = stepwise.draw(model.forward, draws())[1].token_ids[3]
    for wants in (
        draws(),
        draws(stop_token_ids={stop, 3}),
        draws(min_confidence=0.01),
        draws(min_confidence=1.0),
        draws(distribution=DistributionSpec(draw_from_it=True)),
        draws(distribution=DistributionSpec(top_k=5), stop_token_ids={stop, 3}),
        draws(distribution=DistributionSpec(), min_confidence=0.01),
        [*draws(distribution=DistributionSpec(top_k=9, raw=True))[:1], *draws()[1:]],
        [want._replace(max_tokens=1 + 4 * i) for i, want in enumerate(draws())],
        [*draws(), Draw(Step(3, 0, tokens(4), 0), None)],
        [Draw(Step(0, 0, tokens(9, 1), 4), GREEDY), *draws(max_tokens=1)[1:]],
    ):
        check_draws(model, wants)


SAMPLINGS = [
    SamplingParams(1.0),
    SamplingParams(0.7),
    SamplingParams(1.3, top_k=5),
    SamplingParams(1.0, top_k=1),
    SamplingParams(1.0, top_k=1000),
    SamplingParams(2.0, top_p=0.9),
    SamplingParams(1.0, top_p=0.05),
    SamplingParams(1.5, min_p=0.1),
    SamplingParams(0.8, top_k=20, top_p=0.95, min_p=0.02),
]


@pytest.mark.parametrize("name", SETS)
def test_samples_of_many_steps_are_those_of_the_same_steps(name):
    model = native_model(small_model("llama"), name)
    for sampling in SAMPLINGS:
        check_draws(model, draws(sampling=sampling, seed=(1 << 64) - 1))
    check_draws(model, draws(sampling=sampling, min_confidence=0.01))
    check_draws(model, draws(sampling=sampling, distribution=DistributionSpec(top_k=5)))
    check_draws(model, draws(sampling=sampling, distribution=DistributionSpec(top_k=5, raw=True)))
    sent = DistributionSpec(draw_from_it=True)
    check_draws(model, draws(sampling=sampling, distribution=sent, confidences=True))
    check_draws(model, [*draws()[:1], *draws(sampling=sampling)[1:]])
    several = Draw(Step(0, 0, tokens(9, 1), 4), sampling, confidences=True)
    check_draws(model, [several, *draws(max_tokens=1, confidences=True)[1:]])


@pytest.mark.parametrize("name", SETS)
def test_samples_are_those_that_all_noise_gives(name):
    keys = torch.tensor(row_keys(3, range(40)), dtype=torch.int64)
    for vocab_size in (1, 7, 41, 4096):
        for scale in (0.0, 0.3, 3.0, 30.0):
            rows = torch.randn(40, vocab_size) * scale
            rows[::3, 1::2] = -torch.inf
            found = torch.empty(40, dtype=torch.int64)
            compiled(name).functions.flyspec_sample(
                rows.data_ptr(), 40, vocab_size, keys.data_ptr(), found.data_ptr()
            )
            assert found.tolist() == (keyed_noise(keys, vocab_size) + rows).argmax(-1).tolist()


def test_so_many_distributions_that_their_rows_are_not_kept(monkeypatch):
    model = native_model(small_model("llama"), SETS[0])
    wants = draws(distribution=DistributionSpec(top_k=5), confidences=True)
    expected = model.draw(wants)
    monkeypatch.setattr("flyspec.engine.native.model._MAX_KEPT", 0)
    for one, other in zip(model.draw(wants), expected, strict=True):
        assert [list(part) for part in one[:3]] == [list(part) for part in other[:3]]


def test_a_draw_goes_on_in_another_call_where_it_was_left():
    model = native_model(small_model("llama"), SETS[0])
    (whole,) = model.draw(draws()[:1])
    interrupt = Interrupt()
    interrupt.set()
    (some,) = model.draw(draws()[:1], interrupt)
    assert some.token_ids == whole.token_ids[:1]
    # What is left of the confidence is the bound divided by that of the tokens so far.
    bound = 0.9
    for chance in whole.confidences[:6]:
        bound *= chance
    (cut,) = model.draw(draws(min_confidence=bound)[:1])
    assert len(cut.token_ids) == 7
    for chance in some.confidences:
        bound /= chance
    start, last = len(draws()[0].step.token_ids), some.token_ids[-1]
    (rest,) = model.draw(
        [Draw(Step(0, start, [last]), GREEDY, max_tokens=11, min_confidence=bound)]
    )
    assert [*some.token_ids, *rest.token_ids] == cut.token_ids


def test_ties_go_to_the_lower_token():
    module = small_model("llama")
    with torch.no_grad():
        module.lm_head.weight[7:] = module.lm_head.weight[7]
        module.lm_head.weight[:7] = -module.lm_head.weight[7]
    (drawn,) = native_model(module, SETS[0]).draw([Draw(Step(0, 0, tokens(30), 30), GREEDY)])
    assert set(drawn.token_ids) == {0, 7}


@pytest.mark.parametrize("name", SETS)
def test_what_is_no_number_is_no_result(name):
    module = small_model("llama")
    with torch.no_grad():
        module.model.embed_tokens.weight[5] = torch.nan
    model = native_model(module, name)
    fine, ill = [1, 2, 3, 4], [1, 2, 5]
    (expected,) = model.forward([Step(0, 0, fine, 4)])
    for _ in range(2):
        with pytest.raises(FloatingPointError):
            model.forward([Step(1, 0, ill)])
        with pytest.raises(FloatingPointError):
            model.draw([Draw(Step(1, 0, ill), GREEDY, max_tokens=3)])
        # Another sequence, beside it or later in its slot, knows nothing of it.
        (rows,) = model.forward([Step(1, 0, fine, 4)])
        assert torch.equal(rows.logits, expected.logits)
        _, rows = model.forward([Step(0, 0, ill, 0), Step(2, 0, fine, 4)])
        assert torch.equal(rows.logits, expected.logits)


@pytest.mark.parametrize(("value", "name"), pairs([torch.nan, torch.inf, -torch.inf]))
def test_a_logit_that_is_not_finite_is_no_result(value, name):
    module = small_model("llama")
    with torch.no_grad():
        module.lm_head.weight[40, 3] = value  # of one sign in some row, of the other in another
    model, ids = native_model(module, name), tokens(30)
    with pytest.raises(FloatingPointError, match="not finite"):
        model.forward([Step(0, 0, ids, 30)])
    with pytest.raises(FloatingPointError, match="not finite"):
        model.draw([Draw(Step(0, 0, ids, 30), GREEDY)])


def test_bad_steps_are_refused():
    model = native_model(small_model("llama"), SETS[0])
    for ids in ([131], [-1], [2, 10**6]):
        with pytest.raises(ValueError, match="token id"):
            model.forward([Step(0, 0, ids)])
    with pytest.raises(ValueError, match="exceed a slot of 160"):
        model.forward([Step(0, 150, tokens(11))])
    with pytest.raises(ValueError, match="exceed a slot of 160"):
        model.draw([Draw(Step(0, 150, tokens(9)), GREEDY, max_tokens=3)])


def test_it_describes_itself_as_the_module_is_described():
    module = small_model("llama")
    model = native_model(module, SETS[0])
    assert model.info.numerics == f"bfloat16, native step for {SETS[0]}, batch-invariant"
    assert model.bytes_per_token == 2 * 2 * 2 * 2 * 16  # keys and values, layers, heads, bytes
    assert str(model) == f"{compiled(SETS[0]).name}, 1 thread"
