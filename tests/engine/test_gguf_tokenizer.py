"""The tokenizer of a GGUF file: the same tokens as the checkpoint's own and as llama.cpp's."""

from __future__ import annotations

import json
import logging

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from flyspec import bundled
from flyspec.engine.bundle import tokenizer_bundle
from flyspec.engine.native.sample import TEXT
from tests.engine.gguf_models import gguf_file, needs_llama_cpp

pytestmark = needs_llama_cpp

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
    from dataclasses import replace

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
    from flyspec.engine.llama_cpp.pre_tokenizers import pre_tokenizer

    text = "don't stop 12345 :)\n"
    spans = [span for _, span in pre_tokenizer(name).pre_tokenize_str(text)]
    assert [text[a:b] for a, b in spans] == CASES[name]
