"""Translation in both directions, and the draft's tokens when the target's sequence changes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from draft_service.translation import Alignment
from draft_service.translation.stream import CONTROL
from flyspec.errors import InvalidArgumentError
from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import TokenizerBundle
from flyspec.values.tokens import Origin
from tests.draft_service.tokenizer_zoo import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    LOSSLESS,
    MODELS,
    PAD,
    TEXT,
    USER,
    said_by_draft,
    translator,
    units_of_draft,
    units_of_target,
    vocabulary,
)
from tests.examples import examples

FAMILY = "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466"
PIECES = [
    *"abcdefgh ijklmnop QRST 0123456789 .,;:!?<|>#\n\t\r'\"\\{}[]()",
    *(chr(c) for c in range(0x20)), "\x7f", "\x85", "\xa0", "\xad", "\ufeff", "\ufffd", "\uffff",
    "é", "e\u0301", "ñ", "ß", "Å", "\u212b", "ﬁ", "½", "ż\u0323", "\u0301", "\u20dd", "क्षि", "தமிழ்",
    "שלום", "مرحبا", "\u202e", "\u2066", "\u2069", "\u200f",
    "数学", "テスト", "한국어", "각", "\u1100\u1161",
    "😀", FAMILY, "👍🏽", "🏳️\u200d🌈", "🇩🇪", "1\ufe0f\u20e3",
    "\U000e0067", "\U0001d518", "\U0010ffff",
    "<|end|>", "<|bos|>", "</s>", "<0x0A>", "▁", "Ġ", "Ċ", "##ing", "  ", "\r\n", " the", "ing",
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    """A mixture of the pieces and arbitrary characters."""
    parts: list[str] = []
    for _ in range(rng.randint(0, 24)):
        if rng.random() < 0.15:
            code = rng.randrange(0x110000 - 0x800)
            parts.append(chr(code if code < 0xD800 else code + 0x800))
        else:
            parts.append(rng.choice(PIECES))
    return "".join(parts)


def there(source: str, goal: str, text: str) -> list[int]:
    """A text's tokens in one tokenizer, from those in another; without BOS or filler."""
    ids = vocabulary(source).encode(text.encode()).ids
    alignment = Alignment(translator(source, goal), ids, 1 << 20)
    kept, added = alignment.sync(0)
    assert kept == 0
    assert added == alignment.draft_ids
    assert alignment.ready
    return [i for i in alignment.draft_ids if i not in vocabulary(goal).control]


def back(target: str, draft: str, draft_ids: Sequence[int], step: int = 7) -> list[int]:
    """The target's tokens for what a draft adds to an empty text, a few tokens at a time."""
    alignment = Alignment(translator(target, draft), [], 1 << 20)
    alignment.sync(0)
    taken: list[int] = []
    end = vocabulary(draft).eos[0]
    for start in range(0, len(draft_ids) + 1, step):
        piece = [*draft_ids[start : start + step], *([end] * (start + step > len(draft_ids)))]
        alignment.feed(piece, [Origin.EXACT_MODEL] * len(piece))
        ids, origins = alignment.take(1 << 20)
        assert len(ids) == len(origins)
        taken += ids
    assert alignment.stopped
    assert taken[-1] in vocabulary(target).eos
    return taken[:-1]


def text_of(name: str, ids: Sequence[int]) -> str:
    known = vocabulary(name).bytes
    return b"".join(known[i] for i in ids).decode()


@pytest.mark.parametrize("target", LOSSLESS)
@pytest.mark.parametrize("draft", LOSSLESS)
def test_other_tokenizers_both_ways(target: str, draft: str) -> None:
    rng = random.Random(6)
    for text in [TEXT, *(random_text(rng) for _ in range(examples(40)))]:
        ids = there(target, draft, text)
        assert text_of(draft, ids) == text
        assert text_of(target, back(target, draft, ids, step=rng.randint(1, 9))) == text


def test_half_of_a_surrogate_pair_is_refused_as_text_and_kept_as_bytes() -> None:
    known = vocabulary("target")
    data = b"a\xed\xa0\xbdb"  # what a model may say, a byte a token
    ids = known.encode(data).ids
    alignment = Alignment(translator("target", "bytes"), ids, 1000)
    alignment.sync(0)
    assert said_by_draft(alignment, translator("target", "bytes")) == data
    bundle = TokenizerBundle(
        (MODELS / "target" / "tokenizer.json").read_bytes(), "", (EOS,), (EOS,)
    )
    with pytest.raises(InvalidArgumentError, match="character 1 is an unpaired surrogate"):
        Tokenizer(bundle).encode("a\ud83db")


def chat() -> list[int]:
    known = vocabulary("target")
    question = known.encode(b"How many apples are left?").ids
    return [BOS, USER, *question, END, ASSISTANT, *known.encode(b"We subtract: 12 - 3").ids]


def test_control_tokens_without_a_name_there() -> None:
    """An end stays an end; where text would run together there is a new line, else nothing."""
    pair = translator("target", "byte-fallback")
    alignment = Alignment(pair, chat(), 1000)
    alignment.sync(0)
    assert alignment.draft_ids[0] not in pair.draft.control  # the beginning has no name there
    assert said_by_draft(alignment, pair) == b"How many apples are left?We subtract: 12 - 3"
    ends = [i for i in alignment.draft_ids if i in pair.draft.control]
    assert ends == list(pair.draft.eos)
    marked = [USER, *chat()[2:4], PAD, PAD, *chat()[4:6]]
    alignment = Alignment(pair, marked, 1000)
    alignment.sync(0)
    known = pair.target.bytes
    first, second = (b"".join(known[i] for i in chat()[a:b]) for a, b in ((2, 4), (4, 6)))
    assert said_by_draft(alignment, pair) == first + b"\n" + second


def test_a_beginning_of_its_own() -> None:
    """What the draft's tokenizer prepends to a text is there exactly once."""
    pair = translator("byte-level", "bytes")
    ids = vocabulary("byte-level").encode(b"Tom has").ids
    alignment = Alignment(pair, ids, 1000)
    alignment.sync(0)
    assert alignment.draft_ids[0] == BOS
    assert said_by_draft(alignment, pair) == b"Tom has"
    assert Alignment(translator("target", "bytes"), chat(), 1000).draft_ids.count(BOS) == 1


def feed_text(alignment: Alignment, draft: str, data: bytes) -> list[int]:
    ids = vocabulary(draft).encode(data).ids
    alignment.feed(ids, [Origin.EXACT_MODEL] * len(ids))
    return ids


def test_the_ids_that_stand_are_not_changed() -> None:
    """If the whole text would be encoded differently, the proposal follows the existing tokens."""
    known = vocabulary("target")
    whole = known.encode(b"Tom has 12 apples.").ids
    piece = known.encode(b"Tom has 12 app").ids
    assert piece != whole[: len(piece)]
    alignment = Alignment(translator("target", "bytes"), piece, 1000)
    alignment.sync(0)
    feed_text(alignment, "bytes", b"les. He")
    ids, _ = alignment.take(5)
    assert text_of("target", [*piece, *ids]) == "Tom has 12 apples."
    assert alignment.token_ids == [*piece, *ids]
    # Where it agrees, the proposal is what the whole text has there.
    alignment = Alignment(translator("target", "bytes"), whole[:4], 1000)
    alignment.sync(0)
    feed_text(alignment, "bytes", b"12 apples. ")
    assert alignment.take(10)[0] == whole[4:]


def test_a_piece_that_may_grow_stays_behind() -> None:
    alignment = Alignment(translator("target", "bytes"), chat(), 1000)
    alignment.sync(0)
    feed_text(alignment, "bytes", b" = 9 appl")
    ids, _ = alignment.take(5)
    assert text_of("target", ids) == " = 9"
    feed_text(alignment, "bytes", b"es")
    assert alignment.take(1)[0] == []
    feed_text(alignment, "bytes", b"\n")
    assert text_of("target", alignment.take(1)[0]) == " apples"
    alignment.feed([END], [Origin.EXACT_MODEL])
    assert alignment.take(10)[0] == [*vocabulary("target").encode(b"\n").ids, END]
    assert alignment.stopped


def test_control_tokens_are_not_proposed_but_for_the_end() -> None:
    for token, ends in ((USER, False), (PAD, False), (EOS, True), (END, True)):
        alignment = Alignment(translator("target", "bytes"), chat(), 1000)
        alignment.sync(0)
        feed_text(alignment, "bytes", b" = 9")
        alignment.feed([token], [Origin.EXACT_MODEL])
        ids, _ = alignment.take(10)
        assert alignment.stopped
        assert text_of("target", ids[:3]) == " = 9"
        assert ids[3:] == ([token] if ends else [])


def test_the_end_in_a_target_that_calls_it_otherwise() -> None:
    """It is the one that ended the text before, else the first."""
    pair = translator("target", "byte-fallback")
    (end,) = pair.draft.eos
    for context, expected in ((chat(), END), ([BOS, *chat()[2:4]], EOS)):
        alignment = Alignment(pair, context, 1000)
        alignment.sync(0)
        alignment.feed([end], [Origin.EXACT_MODEL])
        assert alignment.take(5)[0] == [expected]


def test_origins() -> None:
    """A token was looked up if all of its text was."""
    alignment = Alignment(translator("target", "bytes"), chat(), 1000)
    alignment.sync(0)
    ids = vocabulary("bytes").encode(b" = 9 apples ").ids
    looked_up = [Origin.EXACT_LOOKUP] * 3 + [Origin.EXACT_MODEL] * 3 + [Origin.EXACT_LOOKUP] * 6
    alignment.feed(ids, looked_up)
    taken, origins = alignment.take(10)
    assert text_of("target", taken) == " = 9 apples"
    assert origins == [
        Origin.EXACT_LOOKUP, Origin.EXACT_LOOKUP, Origin.EXACT_MODEL, Origin.EXACT_MODEL,
    ]  # fmt: skip


def test_inside_a_character() -> None:
    """The target's tokens may end inside a character; the draft continues from there if it can."""
    known = vocabulary("target")
    emoji = known.encode("😀".encode()).ids
    assert len(emoji) > 1
    for cut in range(1, len(emoji)):
        held = b"".join(known.bytes[i] for i in emoji[:cut])
        context = [*chat(), *emoji[:cut]]
        for draft in LOSSLESS:
            alignment = Alignment(translator("target", draft), context, 1000)
            alignment.sync(0)
            assert alignment.ready
            assert said_by_draft(alignment, translator("target", draft)).endswith(held)
            rest = "😀".encode()[len(held) :]
            feed_text(alignment, draft, rest)
            end = vocabulary(draft).eos[0]
            alignment.feed([end], [Origin.EXACT_MODEL])
            ids, _ = alignment.take(10)
            assert ids[:-1] == emoji[cut:]
            alignment.move(len(context), emoji[cut:])
            alignment.sync(0)
            assert text_of(draft, vocabulary(draft).encode("😀".encode()).ids) == "😀"
        alignment = Alignment(translator("target", "printable"), context, 1000)
        alignment.sync(0)
        assert not alignment.ready
        alignment.move(len(context), emoji[cut:])
        alignment.sync(0)
        assert alignment.ready


def test_half_a_character_is_not_proposed() -> None:
    alignment = Alignment(translator("target", "bytes"), chat(), 1000)
    alignment.sync(0)
    feed_text(alignment, "bytes", " = 9 é".encode()[:-1])
    alignment.feed([END], [Origin.EXACT_MODEL])
    ids, _ = alignment.take(10)
    assert text_of("target", ids).strip() == "= 9"


def test_what_the_target_cannot_say_ends_a_proposal() -> None:
    pair = translator("printable", "target")
    alignment = Alignment(pair, vocabulary("printable").encode(b"It was").ids, 1000)
    alignment.sync(0)
    feed_text(alignment, "target", " good für now".encode())
    alignment.feed([END], [Origin.EXACT_MODEL])
    ids, _ = alignment.take(20)
    assert text_of("printable", ids) == " good f"
    assert alignment.stopped


def test_what_was_drafted_beyond_the_proposal_is_kept_where_it_fits() -> None:
    pair = translator("target", "bytes")
    alignment = Alignment(pair, chat(), 1000)
    alignment.sync(0)
    held = len(alignment.draft_ids)
    feed_text(alignment, "bytes", b" = 9 apples")
    ids, _ = alignment.take(10)
    assert text_of("target", ids) == " = 9"
    # All stand, and the target goes on in the same way for a while.
    alignment.move(len(chat()) + len(ids), vocabulary("target").encode(b" apes").ids)
    kept, added = alignment.sync(0)
    assert kept == held + len(b" = 9 ap")
    assert text_of("bytes", added) == "es"
    feed_text(alignment, "bytes", b" or so")
    alignment.move(len(alignment.token_ids), vocabulary("target").encode(b" or so").ids)
    assert alignment.sync(0) == (kept + len(b"es or so"), [])


def test_a_growing_text_is_not_encoded_anew() -> None:
    """Each round sends little to the draft's session, and the result equals a full encoding."""
    for draft in LOSSLESS:
        pair = translator("target", draft)
        ids = vocabulary("target").encode(TEXT.encode()).ids
        alignment = Alignment(pair, ids[:2], 1 << 20)
        alignment.sync(0)
        for place in range(2, len(ids)):
            alignment.move(place, ids[place : place + 1])
            kept, added = alignment.sync(0)
            assert len(alignment.draft_ids) - kept == len(added) <= 24
            # Half a character is spelt, which later is not.
        whole = Alignment(pair, ids, 1 << 20)
        assert said_by_draft(alignment, pair) == said_by_draft(whole, pair)
        same = sum(a == b for a, b in zip(alignment.draft_ids, whole.draft_ids, strict=False))
        assert same >= 0.9 * len(whole.draft_ids), draft


def test_of_a_long_text_the_draft_has_the_end() -> None:
    """Cut rarely, before a word, after what begins every text."""
    pair = translator("target", "bytes")
    limit = 200
    words = vocabulary("target").encode(b" some more words and naught else" * 40).ids
    alignment = Alignment(pair, chat(), limit)
    alignment.sync(20)
    cuts, length = 0, len(chat())
    for token in words:
        alignment.move(length, [token])
        length += 1
        kept, _ = alignment.sync(20)
        cuts += kept <= 1
        ids = alignment.draft_ids
        assert len(ids) + 20 <= limit
        units = units_of_draft(pair, ids)
        whole = units_of_target(pair.target, list(alignment.token_ids))
        if len(units) != len(whole):
            assert units[0] == CONTROL + BOS
            assert units[1:] == whole[-len(units) + 1 :]
            assert units[1] in (0x20, CONTROL + END, CONTROL + ASSISTANT)
            assert len(ids) >= 70
    assert 10 <= cuts <= len(words) * 5 / 80
    # Far back again: as much as fits of what is there.
    alignment.move(len(chat()) + 3, [])
    alignment.sync(20)
    assert units_of_draft(pair, alignment.draft_ids) == units_of_target(
        pair.target, list(alignment.token_ids)
    )


def test_a_very_long_text_is_not_read_from_its_beginning() -> None:
    pair = translator("target", "bytes")
    ids = vocabulary("target").encode(("Zählen 😀 " * 5000).encode()).ids
    alignment = Alignment(pair, ids, 300)
    kept, added = alignment.sync(100)
    assert kept == 0
    assert 100 <= len(added) <= 200
    assert said_by_draft(alignment, pair).decode().endswith("Zählen 😀 ")


def test_nothing_to_say() -> None:
    """A session needs a token, even if the text has none."""
    pair = translator("target", "byte-fallback")
    alignment = Alignment(pair, [USER], 100)
    _, added = alignment.sync(10)
    assert len(added) == 1
    ids = vocabulary("target").encode(b"Tom").ids
    alignment.move(1, ids)
    kept, added = alignment.sync(10)
    assert kept == 0
    assert said_by_draft(alignment, pair) == b"Tom"
    assert added == alignment.draft_ids
