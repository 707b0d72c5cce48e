"""A tokenizer as bytes: any bytes, from anywhere in a text, but no control tokens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from draft_service.translation import Vocabulary
from draft_service.translation.vocabulary import num_whole
from flyspec.errors import InvalidArgumentError
from tests.draft_service.tokenizer_zoo import BOS, END, LOSSLESS, MODELS, TEXT, made, vocabulary

BYTES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=30).map(lambda t: t.encode("utf-8", "surrogatepass")),
    st.text(alphabet="ab <|end>e\u0301é😀\u200d👩 \n", max_size=30).map(str.encode),
)


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=BYTES)
def test_any_bytes_come_back(name: str, data: bytes) -> None:
    known = vocabulary(name)
    encoded = known.encode(data)
    pieces = [known.bytes[i] for i in encoded.ids]
    assert b"".join(pieces) == data
    assert encoded.ends == [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    assert encoded.num_exact == len(pieces)
    assert 0 <= encoded.num_settled <= len(pieces)
    assert known.control.keys().isdisjoint(encoded.ids)


@given(data=BYTES)
def test_what_cannot_be_said_is_marked(data: bytes) -> None:
    known = vocabulary("printable")
    encoded = known.encode(data)
    exact = encoded.ids[: encoded.num_exact]
    said = b"".join(known.bytes[i] for i in exact)
    assert data.startswith(said)
    assert (encoded.num_exact == len(encoded.ids) and encoded.ends[-1:] == [len(data)]) == (
        said == data
    ) or not data
    assert encoded.ends == sorted(encoded.ends)
    assert known.control.keys().isdisjoint(encoded.ids)


@pytest.mark.parametrize("name", LOSSLESS)
def test_plain_text_is_encoded_as_the_tokenizer_does(name: str) -> None:
    known = vocabulary(name)
    if name in ("target", "bytes"):
        folder = "target" if name == "target" else "draft-bytes"
        tokenizer = Tokenizer.from_file(str(MODELS / folder / "tokenizer.json"))
        expected = tokenizer.encode(TEXT, add_special_tokens=False).ids
        assert known.encode(TEXT.encode()).ids == expected
    # A piece from the middle is a piece: no space is put before it.
    assert known.encode(b"sum").ids == known.encode(b"sum").ids
    assert known.bytes[known.encode(b"sum").ids[0]][:1] == b"s"


def test_names_of_control_tokens_in_a_text_are_text() -> None:
    known = vocabulary("target")
    encoded = known.encode(b"a<|end|><|bos|>b")
    assert not {END, BOS} & set(encoded.ids)
    assert b"".join(known.bytes[i] for i in encoded.ids) == b"a<|end|><|bos|>b"


def test_control_tokens_that_the_file_does_not_mark() -> None:
    """A control token named only in the model's configuration is not produced from text either."""
    data = (MODELS / "target" / "tokenizer.json").read_bytes()
    ordinary = Tokenizer.from_buffer(data).encode(" apples", add_special_tokens=False).ids
    assert len(ordinary) == 1
    known = Vocabulary(data, (1,), (0, *ordinary), 4096)
    encoded = known.encode(b"12 apples.")
    assert ordinary[0] not in encoded.ids
    assert b"".join(known.bytes[i] for i in encoded.ids) == b"12 apples."


def test_ids_beyond_the_model_are_not_made() -> None:
    data = (MODELS / "target" / "tokenizer.json").read_bytes()
    whole = vocabulary("target").encode(TEXT.encode())
    size = max(whole.ids)
    known = Vocabulary(data, (1,), range(6), size)
    encoded = known.encode(TEXT.encode())
    assert max(encoded.ids) < size
    assert b"".join(known.bytes[i] for i in encoded.ids) == TEXT.encode()


def test_settled_tokens_hardly_change() -> None:
    """Settled tokens of a text do not change when the text continues."""
    text = TEXT.encode()
    for name in LOSSLESS:
        known, changed, total = vocabulary(name), 0, 0
        final = known.encode(text).ids
        for length in range(len(text)):
            if num_whole(text[:length]) == length:
                made_ = known.encode(text[:length])
                total += 1
                changed += made_.ids[: made_.num_settled] != final[: made_.num_settled]
        assert changed <= 0.02 * total, (name, changed, total)


def test_whole_characters() -> None:
    for text in ("", "a", "é", "数", "😀", "ab😀"):
        data = text.encode()
        assert num_whole(data) == len(data)
        for cut in range(1, len(text[-1:].encode())):
            assert num_whole(data[:-cut]) == len(text[:-1].encode())
    assert num_whole(b"\x80\x80") == 2
    assert num_whole(b"a\xff") == 2


def tokenizer_that(*, normalizer: object = None, model: object = None) -> Tokenizer:
    tokenizer = Tokenizer(model or models.BPE(unk_token="<unk>"))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = (trainers.WordLevelTrainer if isinstance(model, models.WordLevel)
               else trainers.BpeTrainer)(special_tokens=["<unk>"], show_progress=False)  # fmt: skip
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        tokenizer_that(normalizer=normalizers.Lowercase()),
        tokenizer_that(normalizer=normalizers.Strip()),
        tokenizer_that(normalizer=normalizers.Replace("  ", " ")),
        tokenizer_that(model=models.WordLevel(unk_token="<unk>")),
    ],
    ids=["lower case", "strips", "joins spaces", "whole words"],
)
def test_tokenizers_that_lose_plain_text_are_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match="does not reproduce plain text"):
        made(tokenizer, 0, range(1))


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff\xfe", b"null", b"[" * 100_000, b'{"model":{"type":"X"}}',
     b'{"model":{"type":"Unigram","vocab":[],"unk_id":null}}',
     b'{"model":{"type":"WordLevel","vocab":{},"unk_token":"u"}}'],
)  # fmt: skip
def test_nonsense_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json"):
        Vocabulary(data, (1,), (), 100)


def test_padding_truncation_and_dropout_do_not_reach_the_text() -> None:
    spec = json.loads((MODELS / "target" / "tokenizer.json").read_text())
    spec["truncation"] = {
        "direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0,
    }  # fmt: skip
    spec["padding"] = {
        "strategy": {"Fixed": 64}, "direction": "Left", "pad_to_multiple_of": None,
        "pad_id": 2, "pad_type_id": 0, "pad_token": "<|pad|>",
    }  # fmt: skip
    spec["model"]["dropout"] = 0.9
    known = Vocabulary(json.dumps(spec).encode(), (1, 5), range(6), 4096)
    assert known.encode(TEXT.encode()).ids == vocabulary("target").encode(TEXT.encode()).ids
    assert known.head == [BOS]
