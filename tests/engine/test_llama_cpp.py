"""A model in llama.cpp: transformers' logits and tokens, rollback, draws; what it refuses."""

import json
import logging
from dataclasses import replace
from functools import partial

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from flyspec import bundled
from flyspec.config import DraftSettings
from flyspec.engine import stepwise
from flyspec.engine.bundle import tokenizer_bundle
from flyspec.engine.cache_table import Copy
from flyspec.engine.model import Draw, History, Interrupt, Step
from flyspec.engine.native.sample import TEXT
from flyspec.errors import ConfigError
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.reference import Reference
from tests.engine.gguf_models import gguf_file, load, needs_llama_cpp

pytestmark = needs_llama_cpp
IDS = [0, 3, *((7 * i * i + 3 * i + 11) % 4000 + 6 for i in range(58))]
GREEDY = SamplingParams()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def model(folder):
    _, model = load(gguf_file(folder, "f32"))
    model.warm_up()
    return model


@pytest.fixture(autouse=True)
def _forgotten(request):
    yield
    if "model" in request.fixturenames:
        request.getfixturevalue("model").cache.forget()


@pytest.fixture(scope="module")
def own_logits():
    module = AutoModelForCausalLM.from_pretrained(bundled.DRAFT, dtype=torch.float32)
    with torch.inference_mode():
        return module(torch.tensor([IDS])).logits[0]


def near(got, expected, tolerance=1e-3):
    return got.shape == expected.shape and float((got - expected).abs().max()) < tolerance


def test_its_logits_are_those_of_transformers(model, own_logits):
    (rows,) = model.forward([Step(0, 0, IDS, len(IDS))])
    assert near(rows.logits, own_logits)
    assert rows.logits.dtype == torch.float32


@pytest.mark.parametrize(("kind", "tolerance"), [("f16", 0.05), ("bf16", 0.3), ("q8_0", 1.5)])
def test_narrower_types_are_near_it(folder, own_logits, kind, tolerance):
    loaded, model = load(gguf_file(folder, kind))
    (rows,) = model.forward([Step(0, 0, IDS, len(IDS))])
    assert near(rows.logits, own_logits, tolerance)
    assert not near(rows.logits, own_logits, 1e-6)
    assert loaded.info.dtype == kind.upper()


def test_a_rollback_is_a_length(model, own_logits):
    model.forward([Step(1, 0, [*IDS[:20], 9, 9, 9, 9])])
    (first,) = model.forward([Step(1, 20, IDS[20:30], 10)])
    assert near(first.logits, own_logits[20:30])
    (again,) = model.forward([Step(1, 5, IDS[5:], 4)])
    assert near(again.logits, own_logits[-4:])
    (from_start,) = model.forward([Step(1, 0, IDS[:3], 3)])
    assert near(from_start.logits, own_logits[:3])
    assert model.cache.held(1) == IDS[:3]


def test_slots_run_together_in_any_order_and_length(model, own_logits):
    model.forward([Step(3, 0, IDS[:10], 0), Step(0, 0, IDS[:40], 0)])
    late, short, none, whole = model.forward([
        Step(3, 10, IDS[10:15], 5), Step(0, 40, IDS[40:41], 1), Step(2, 0, IDS[:7], 0),
        Step(1, 0, IDS, len(IDS)),
    ])  # fmt: skip
    assert near(late.logits, own_logits[10:15])
    assert near(short.logits, own_logits[40:41])
    assert none.logits.shape == (0, model.info.vocab_size)
    assert near(whole.logits, own_logits)


def test_a_prefix_is_copied_from_a_busy_slot(model, own_logits):
    model.forward([Step(0, 0, IDS)])
    model.cache.pending_copies.append(Copy(0, 2, 30))
    (rows,) = model.forward([Step(2, 30, IDS[30:], 5)])
    assert near(rows.logits, own_logits[-5:])
    (kept,) = model.forward([Step(0, len(IDS) - 1, IDS[-1:], 1)])
    assert near(kept.logits, own_logits[-1:])


def test_a_step_larger_than_a_batch_is_run_in_pieces(folder, own_logits):
    _, model = load(gguf_file(folder, "f32"), max_num_batched_tokens=128)
    steps = [Step(slot, 0, IDS, 10) for slot in range(4)]
    for rows in model.forward(steps):
        assert near(rows.logits, own_logits[-10:])


def test_greedy_texts_are_those_of_transformers(model):
    expected = Reference(str(bundled.DRAFT), "float32").generate(IDS[:12], 40, True)
    draw = Draw(Step(0, 0, IDS[:12]), GREEDY, max_tokens=40)
    (drawn,) = model.draw([draw])
    assert drawn.token_ids == [*expected]
    # The last token drawn is not in the cache.
    assert model.cache.held(0) == [*IDS[:12], *drawn.token_ids[:-1]]


SETTINGS = [
    {"sampling": GREEDY, "confidences": True},
    {"sampling": GREEDY, "min_confidence": 0.05},
    {"sampling": SamplingParams(temperature=0.8, top_k=20), "seed": 5},
    {"sampling": SamplingParams(temperature=1.0), "seed": 6, "confidences": True},
    {"sampling": SamplingParams(frequency_penalty=1.5), "history": History(IDS[:12], 12)},
    {"sampling": GREEDY, "distribution": DistributionSpec(top_k=3)},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=range(len(SETTINGS)))
def test_draws_are_those_made_step_by_step(model, settings):
    draws = [
        Draw(Step(0, 0, IDS[:12]), max_tokens=9, **settings),
        Draw(Step(2, 0, IDS[3:30]), max_tokens=4, **settings),
        Draw(Step(1, 0, IDS[5:9], 0)),
    ]
    expected = stepwise.draw(model.forward, draws)
    model.cache.forget()
    drawn = model.draw(draws)
    assert [d.token_ids for d in drawn] == [d.token_ids for d in expected]
    assert [[*d.origins] for d in drawn] == [[*d.origins] for d in expected]
    for one, other in zip(drawn, expected, strict=True):
        assert one.confidences == pytest.approx(other.confidences, rel=1e-4)
        assert len(one.distributions) == len(other.distributions)


def test_a_draw_ends_at_a_stop_and_when_interrupted(model):
    draw = partial(Draw, Step(0, 0, IDS[:12]), GREEDY, max_tokens=10)
    (whole,) = model.draw([draw()])
    stop = whole.token_ids[3]
    (stopped,) = model.draw([draw(stop_token_ids=[stop])])
    assert stopped.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    interrupt = Interrupt()
    interrupt.set()
    (one,) = model.draw([draw()], interrupt)
    assert one.token_ids == whole.token_ids[:1]


def test_rows_that_continue_a_guess_are_drawn_together(model):
    (whole,) = model.draw([Draw(Step(0, 0, IDS[:12]), GREEDY, max_tokens=6)])
    guess = whole.token_ids[:5]
    (rows,) = model.draw([Draw(Step(0, 11, [IDS[11], *guess], 6), GREEDY)])
    assert rows.token_ids == whole.token_ids


def test_hidden_rows_and_unknown_tokens_are_refused(model):
    with pytest.raises(ValueError, match="which returns no hidden rows"):
        model.forward([Step(0, 0, [1], hidden_layers=(-1,))])
    with pytest.raises(ValueError, match="token ids must be between 0 and 4095"):
        model.forward([Step(0, 0, [4096])])
    with pytest.raises(ValueError, match="exceed a slot of 512"):
        model.forward([Step(0, 510, [1, 2, 3])])


def test_describe_names_the_type_and_llama_cpp(folder, model):
    info = model.info
    assert (info.vocab_size, info.context_length, info.num_parameters) == (4096, 512, 950_912)
    assert info.numerics.startswith("all F32, llama.cpp ")
    assert ", 1 thread, float32 cache, rows of a batch " in info.numerics
    model.warm_up()
    assert model.info.numerics.count("rows of a batch") == 1
    assert info.name == "draft-f32"


def test_a_quantised_file_is_another_model(folder):
    loaded = {kind: load(gguf_file(folder, kind))[0] for kind in ("bf16", "q8_0")}
    prints = {which.info.weights_fingerprint for which in loaded.values()}
    assert len(prints) == 2
    assert all(len(one) == 32 for one in prints)
    # The same tokens, so that either drafts for the other.
    assert len({which.info.tokenizer_fingerprint for which in loaded.values()}) == 1


def test_a_drafter_uses_its_own_limit_and_a_target_refuses(folder):
    from flyspec.engine.llama_cpp.loading import load as load_gguf

    path = str(gguf_file(folder, "bf16"))
    _, drafter = load_gguf(
        DraftSettings(model=path, max_model_len=9999, max_sessions=1), drafts=True
    )
    assert drafter.info.context_length == 4096
    with pytest.raises(ConfigError, match="--max-model-len 9999: the model's own limit is 4096"):
        load(path, max_model_len=9999)


def test_slots_fit_the_memory_for_the_cache(folder):
    path = gguf_file(folder, "f16")
    per_token = 2 * 4 * 32 * 2 * 2
    _, model = load(path, kv_cache_memory_bytes=3 * 512 * per_token)
    assert model.cache.num_slots == 3
    with pytest.raises(ConfigError, match="one session needs"):
        load(path, kv_cache_memory_bytes=512)


def test_a_damaged_file_is_refused(folder, tmp_path):
    whole = gguf_file(folder, "q8_0").read_bytes()
    for cut in (100, 20_000, len(whole) - 5000):
        path = tmp_path / f"cut-{cut}.gguf"
        path.write_bytes(whole[:cut])
        with pytest.raises(ConfigError, match=r"cut-\d+.gguf: (cannot be read|llama.cpp cannot)"):
            load(path)


@pytest.mark.parametrize("flash_attn", ["auto", "on", "off"])
def test_flash_attention_is_as_set(folder, own_logits, flash_attn):
    loaded, model = load(gguf_file(folder, "bf16"), flash_attn=flash_attn)
    assert ("flash attention" in loaded.info.numerics) == (flash_attn == "on")
    (rows,) = model.forward([Step(0, 0, IDS, len(IDS))])
    assert near(rows.logits, own_logits, 0.2)


TEXTS = [TEXT, "", " ", "  two  spaces\n\n\tand tabs ", "x=12345.67e-8", "naïve 数学 😀👩‍👩‍👧",
         "<|user|>Hi<|end|>\n", "don't WON'T i'Ll"]  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return gguf_file(tmp_path_factory.mktemp("gguf"), "q8_0")


@pytest.fixture(scope="module")
def read(path):
    from flyspec.engine.llama_cpp.binding import GgufModel
    from flyspec.engine.llama_cpp.gguf_file import GgufFile
    from flyspec.engine.llama_cpp.tokenizer import read_bundle

    file, model = GgufFile(path), GgufModel(path, 0)
    return file, model.vocabulary, read_bundle(file, model.vocabulary)


def test_it_equals_the_checkpoints(read):
    _, _, bundle = read
    own = AutoTokenizer.from_pretrained(bundled.DRAFT)
    expected = tokenizer_bundle(own, GenerationConfig.from_pretrained(bundled.DRAFT))
    for field in ("fingerprint", "eos_token_ids", "control_token_ids", "bos_token_id",
                  "chat_template", "named_chat_templates"):  # fmt: skip
        assert getattr(bundle, field) == getattr(expected, field), field
    assert {"bos_token", "eos_token", "pad_token"} <= dict(bundle.special_tokens).keys()


@pytest.mark.parametrize("text", TEXTS)
def test_texts_have_the_same_tokens_in_all_three(read, text):
    _, vocabulary, bundle = read
    ours = Tokenizer.from_buffer(bundle.tokenizer_json)
    own = AutoTokenizer.from_pretrained(bundled.DRAFT)
    ids = ours.encode(text).ids
    assert ids == own(text).input_ids
    assert ids == vocabulary.encode(text)
    assert ours.decode(ids) == own.decode(ids, skip_special_tokens=True)


def test_other_tokens_than_llama_cpps_are_told(read, caplog):
    from flyspec.engine.llama_cpp.tokenizer import check

    file, vocabulary, bundle = read
    with caplog.at_level(logging.WARNING):
        check(file, vocabulary, bundle)
    assert not caplog.records
    other = json.loads(bundle.tokenizer_json)
    other["pre_tokenizer"]["pretokenizers"] = other["pre_tokenizer"]["pretokenizers"][-1:]
    with caplog.at_level(logging.WARNING):
        check(file, vocabulary, replace(bundle, tokenizer_json=json.dumps(other).encode()))
    assert "differ from token" in caplog.text


# Each is made with the pattern of a model's own tokenizer.json.
CASES = {
    "gpt-2": ["don", "'t", " stop", " 12345", " :)", "\n"],
    "smollm": ["don", "'t", " stop", " ", "1", "2", "3", "4", "5", " :)", "\n"],
    "llama-bpe": ["don", "'t", " stop", " ", "123", "45", " :)\n"],
    "qwen2": ["don", "'t", " stop", " ", "1", "2", "3", "4", "5", " :)\n"],
    "gpt-4o": ["don't", " stop", " ", "123", "45", " :)\n"],
    "tekken": ["don", "'t", " stop", " ", "1", "2", "3", "4", "5", " :)\n"],
    "deepseek-v3": ["don", "'t", " stop", " ", "123", "45", " :)\n"],
}


@pytest.mark.parametrize("name", CASES)
def test_text_is_split_as_the_name_says(name):
    from flyspec.engine.llama_cpp.tokenizer import pre_tokenizer

    text = "don't stop 12345 :)\n"
    spans = [span for _, span in pre_tokenizer(name).pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == CASES[name]
