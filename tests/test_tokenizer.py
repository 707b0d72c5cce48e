"""Differences between checkpoints' tokenizers: byte fallback, chat templates."""

from __future__ import annotations

import random
import threading
import time

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models

from flyspec.errors import InvalidArgumentError
from flyspec.tokenizer import TokenBytes, Tokenizer
from flyspec.values.admin import TokenizerBundle
from flyspec.values.chat import Chat

WORDS = ["▁", "a", "b", "▁a", "▁the", "é", "数", "\n", "."]


@pytest.fixture(scope="module")
def data():
    """A tokenizer that encodes unknown characters as bytes, like the first Llama's."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocab |= {word: 256 + i for i, word in enumerate(WORDS)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer.to_str().encode()


def _streamed(tokenizer, ids):
    stream = tokenizer.detokenizer()
    return "".join([*(stream.push(i) for i in ids), stream.flush()])


def test_bytes_that_are_no_characters_do_not_end_a_stream(data):
    tokenizer = Tokenizer(TokenizerBundle(data, "f", (), ()))
    rng = random.Random(1)
    for _ in range(100):
        ids = [rng.randrange(128, 256) if rng.random() < 0.5 else 256 + rng.randrange(len(WORDS))
               for _ in range(40)]  # fmt: skip
        assert _streamed(tokenizer, ids).count("数") == tokenizer.decode(ids).count("数")
    stray = [0x09, 0xE6, 0x95, 259, 260]  # half a character behind a tab, then words
    assert _streamed(tokenizer, stray).endswith(" a the")


def test_characters_in_bytes_are_whole(data):
    tokenizer = Tokenizer(TokenizerBundle(data, "f", (), ()))
    ids = [260, *"😀ü".encode(), 259, *"数学".encode(), 0x0A]
    assert _streamed(tokenizer, ids) == tokenizer.decode(ids) == "the😀ü a数学\n"


def test_an_unreadable_chat_template_only_refuses_chats(data):
    bundle = TokenizerBundle(data, "f", (), (), chat_template="{% generation %}")
    tokenizer = Tokenizer(bundle)
    assert tokenizer.decode([257]) == "a"
    with pytest.raises(InvalidArgumentError, match=r"cannot be read.*send text or token_ids"):
        tokenizer.encode_chat(Chat.of_user("hi"))


@pytest.mark.parametrize("kind", ["ByteLevel", "ByteFallback"])
def test_bytes_of_one_token_and_of_all(kind):
    """As vocabularies spell them: printable stand-ins for bytes, or <0xNN> and ▁."""
    if kind == "ByteLevel":
        vocabulary = {"a": 0, "Ġcat": 1, "â": 2, "Ĥ¬": 3, "<0x0A>": 4}
        expected = {0: b"a", 1: b" cat", 2: b"\xe2", 3: b"\x82\xac", 4: b"<0x0A>", 5: b"<|eos|>"}
        decoder = decoders.ByteLevel()
    else:
        vocabulary = {"a": 0, "▁cat": 1, "<0xE2>": 2, "â": 3, "<0x0A>": 4}
        expected = {0: b"a", 1: b" cat", 2: b"\xe2", 3: "â".encode(), 4: b"\n", 5: b"<|eos|>"}
        decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])
    tokenizer = RustTokenizer(models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<|eos|>"])
    tokenizer.decoder = decoder
    found = TokenBytes(tokenizer)
    assert found.all() == expected
    assert {i: found.of(i) for i in expected} == expected
    assert found.of(99) == b""


def test_others_run_while_a_long_text_is_encoded(data):
    """Else every stream of a server waits for each long prompt."""
    tokenizer = Tokenizer(TokenizerBundle(data, "f", (), ()))
    encoding = threading.Thread(target=tokenizer.encode, args=("a the é " * 40_000,))
    begin = last = time.perf_counter()
    longest = 0.0
    encoding.start()
    while encoding.is_alive():
        time.sleep(0.0005)
        now = time.perf_counter()
        longest, last = max(longest, now - last), now
    assert longest < (last - begin) / 2
