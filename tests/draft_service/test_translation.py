"""Tokenizers as bytes, translation both ways, and the draft's tokens when the text changes."""

import json
import random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from draft_service.drafters.translated import TranslatedSession
from draft_service.translation import Alignment, Vocabulary
from draft_service.translation.alignment import CONTROL
from draft_service.translation.vocabulary import num_whole
from flyspec.errors import InvalidArgumentError
from flyspec.tokenizer import Tokenizer as TargetTokenizer
from flyspec.values.admin import DrafterInfo, ModelInfo, TokenizerBundle
from flyspec.values.rounds import DistributionSpec, DraftOpen
from flyspec.values.tokens import Drafted, Origin, SamplingParams, TokenDistribution
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
    made,
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


def random_text(rng):
    """A mixture of the pieces and arbitrary characters."""
    parts = []
    for _ in range(rng.randint(0, 24)):
        if rng.random() < 0.15:
            code = rng.randrange(0x110000 - 0x800)
            parts.append(chr(code if code < 0xD800 else code + 0x800))
        else:
            parts.append(rng.choice(PIECES))
    return "".join(parts)


def there(source, goal, text):
    """A text's tokens in one tokenizer, from those in another; without BOS or filler."""
    ids = vocabulary(source).encode(text.encode()).ids
    alignment = Alignment(translator(source, goal), ids, 1 << 20)
    kept, added = alignment.sync(0)
    assert kept == 0
    assert added == alignment.draft_ids
    assert alignment.ready
    return [i for i in alignment.draft_ids if i not in vocabulary(goal).control]


def back(target, draft, draft_ids, step=7):
    """The target's tokens for what a draft adds to an empty text, a few tokens at a time."""
    alignment = Alignment(translator(target, draft), [], 1 << 20)
    alignment.sync(0)
    taken = []
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


def text_of(name, ids):
    known = vocabulary(name).bytes
    return b"".join(known[i] for i in ids).decode()


@pytest.mark.parametrize("target", LOSSLESS)
@pytest.mark.parametrize("draft", LOSSLESS)
def test_other_tokenizers_both_ways(target, draft):
    rng = random.Random(6)
    for text in [TEXT, *(random_text(rng) for _ in range(examples(40)))]:
        ids = there(target, draft, text)
        assert text_of(draft, ids) == text
        assert text_of(target, back(target, draft, ids, step=rng.randint(1, 9))) == text


def test_half_of_a_surrogate_pair_is_refused_as_text_and_kept_as_bytes():
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
        TargetTokenizer(bundle).encode("a\ud83db")


def chat():
    known = vocabulary("target")
    question = known.encode(b"How many apples are left?").ids
    return [BOS, USER, *question, END, ASSISTANT, *known.encode(b"We subtract: 12 - 3").ids]


def test_control_tokens_without_a_name_there():
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


def test_a_beginning_of_its_own():
    """The prefix that the draft's tokenizer adds to a text is there exactly once."""
    pair = translator("byte-level", "bytes")
    ids = vocabulary("byte-level").encode(b"Tom has").ids
    alignment = Alignment(pair, ids, 1000)
    alignment.sync(0)
    assert alignment.draft_ids[0] == BOS
    assert said_by_draft(alignment, pair) == b"Tom has"
    assert Alignment(translator("target", "bytes"), chat(), 1000).draft_ids.count(BOS) == 1


def feed_text(alignment, draft, data):
    ids = vocabulary(draft).encode(data).ids
    alignment.feed(ids, [Origin.EXACT_MODEL] * len(ids))
    return ids


def test_the_ids_that_stand_are_not_changed():
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


def test_a_piece_that_may_grow_stays_behind():
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


def test_the_end_in_a_target_that_calls_it_otherwise():
    """It is the one that ended the text before, else the first."""
    pair = translator("target", "byte-fallback")
    (end,) = pair.draft.eos
    for context, expected in ((chat(), END), ([BOS, *chat()[2:4]], EOS)):
        alignment = Alignment(pair, context, 1000)
        alignment.sync(0)
        alignment.feed([end], [Origin.EXACT_MODEL])
        assert alignment.take(5)[0] == [expected]


def test_origins():
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


def test_half_a_character_is_not_proposed():
    alignment = Alignment(translator("target", "bytes"), chat(), 1000)
    alignment.sync(0)
    feed_text(alignment, "bytes", " = 9 é".encode()[:-1])
    alignment.feed([END], [Origin.EXACT_MODEL])
    ids, _ = alignment.take(10)
    assert text_of("target", ids).strip() == "= 9"


def test_what_the_target_cannot_say_ends_a_proposal():
    pair = translator("printable", "target")
    alignment = Alignment(pair, vocabulary("printable").encode(b"It was").ids, 1000)
    alignment.sync(0)
    feed_text(alignment, "target", " good für now".encode())
    alignment.feed([END], [Origin.EXACT_MODEL])
    ids, _ = alignment.take(20)
    assert text_of("printable", ids) == " good f"
    assert alignment.stopped


def test_what_was_drafted_beyond_the_proposal_is_kept_where_it_fits():
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


def test_a_growing_text_is_not_encoded_anew():
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


def test_a_very_long_text_is_not_read_from_its_beginning():
    pair = translator("target", "bytes")
    ids = vocabulary("target").encode(("Zählen 😀 " * 5000).encode()).ids
    alignment = Alignment(pair, ids, 300)
    kept, added = alignment.sync(100)
    assert kept == 0
    assert 100 <= len(added) <= 200
    assert said_by_draft(alignment, pair).decode().endswith("Zählen 😀 ")


def test_nothing_to_say():
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


WORDS = [
    "apples ",
    " =",
    "9",
    "😀",
    "e\u0301",
    "數",
    "\n\n",
    "  ",
    "Tom",
    "'s",
    "<|end|>",
    ".",
    "\0",
]
PAIRS = [
    ("target", "bytes"),
    ("bytes", "target"),
    ("target", "byte-level"),
    ("target", "byte-fallback"),
    ("byte-fallback", "nfc"),
]


class Script:
    """A drafter that drafts exactly what the script says, in runs of the scripted length."""

    needs_model = True

    def __init__(self, context_length, vocab_size):
        model = ModelInfo("script", "", vocab_size, context_length)
        self.info = DrafterInfo("model", "model", model)
        self.tokens = []
        self.drafts = []
        self.most, self.max_length = 0, context_length

    def open(self, open_):
        assert open_.token_ids
        assert open_.distribution is None
        self.tokens = list(open_.token_ids)
        return self

    @property
    def token_ids(self):
        return self.tokens

    def move(self, keep_length, append_token_ids):
        assert 0 <= keep_length <= len(self.tokens)
        del self.tokens[keep_length:]
        self.tokens += append_token_ids
        assert self.tokens

    def propose(self, max_tokens):
        assert self.info.model is not None
        assert len(self.tokens) + max_tokens <= self.info.model.context_length
        for run in self.drafts:
            kept = run[:max_tokens]
            max_tokens -= len(kept)
            self.tokens += kept
            if kept:
                yield Drafted(kept, [Origin.EXACT_MODEL] * len(kept))

    def close(self):
        self.tokens = []


class Session(RuleBasedStateMachine):
    """A target's sequence moves and gets proposals; `target`, `draft`, `limit` are the pair's."""

    target, draft, limit = "target", "bytes", 1 << 16

    @initialize(data=st.data())
    def open(self, data):
        self.pair = translator(self.target, self.draft)
        known = vocabulary(self.draft)
        self.script = Script(self.limit, known.vocab_size)
        self.model = data.draw(self.some_tokens())
        self.session = TranslatedSession(
            self.script,
            Alignment(self.pair, self.model, self.script.max_length),
            DraftOpen(self.model, SamplingParams(), 0, distribution=DistributionSpec()),
        )
        self.held = len(self.model)

    def some_tokens(self, least=1):
        """Any tokens the target may emit: of a text, of any bytes, control tokens."""
        known = vocabulary(self.target)
        of_text = st.lists(st.sampled_from(WORDS), max_size=5).map(
            lambda words: known.encode("".join(words).encode()).ids
        )
        of_bytes = st.binary(max_size=5).map(lambda data: known.encode(data).ids)
        any_ids = st.lists(st.integers(0, known.vocab_size - 1), max_size=4)
        control = st.sampled_from([*known.control]).map(lambda i: [i])
        part = st.one_of(of_text, of_text, of_bytes, any_ids, control)
        return st.lists(part, min_size=1, max_size=3).map(
            lambda parts: [i for p in parts for i in p] or [0] * least
        )

    @rule(data=st.data())
    def move(self, data):
        """Move anywhere: into the last proposal, or far back."""
        most = len(self.model)
        keep = data.draw(
            st.one_of(st.integers(0, most), st.integers(max(self.held - 2, 0), most), st.just(most))
        )
        append = data.draw(self.some_tokens(0))
        if keep + len(append) == 0:
            append = [0]
        self.session.move(keep, append)
        self.model[keep:] = append
        self.held = len(self.model)

    @rule(data=st.data(), limit=st.integers(1, 12))
    def propose(self, data, limit):
        """Any output of the draft: text, halves of characters, control tokens, nonsense."""
        self.check_aligned()
        known = vocabulary(self.draft)
        of_text = st.lists(st.sampled_from(WORDS), max_size=6).map(
            lambda words: known.encode("".join(words).encode()).ids
        )
        any_ids = st.lists(st.integers(0, known.vocab_size + 3), max_size=6)
        self.script.drafts = data.draw(
            st.lists(st.one_of(of_text, of_text, any_ids), min_size=1, max_size=4)
        )
        drafted = [i for run in self.script.drafts for i in run]
        context = list(self.model)
        proposed = []
        # It neither scores what it is told nor is it sure of what it says.
        for item in self.session.propose(limit, 0.9, 5):
            assert isinstance(item, Drafted)
            assert not item.confidences
            assert len(item.token_ids) == len(item.origins) == len(item.distributions)
            assert set(item.distributions) == {TokenDistribution()}
            proposed += item.token_ids
        self.check_proposal(proposed, drafted, limit)
        self.model = context + proposed
        self.held = len(context)

    def check_proposal(self, proposed, drafted, limit):
        """It is no longer than requested, drafted text, with a control token only at the end."""
        target, draft = self.pair.target, self.pair.draft
        assert len(proposed) <= limit
        if proposed and proposed[-1] in target.control:
            assert proposed[-1] in target.eos
            proposed = proposed[:-1]
        assert all(token in target.bytes for token in proposed)
        said = b"".join(target.bytes[i] for i in proposed)
        assert b"".join(draft.bytes.get(i, b"\0") for i in drafted).startswith(said)

    @precondition(lambda self: hasattr(self, "session"))
    @invariant()
    def same_sequence(self):
        assert list(self.session.token_ids) == self.model

    def check_aligned(self):
        """The draft's session has the target's text, tokenized as a new session would."""
        assert not [*self.session.propose(0)]
        self.script.drafts = []
        assert not [*self.session.propose(1)]
        said = units_of_draft(self.pair, self.script.tokens)
        expected = units_of_target(self.pair.target, self.model)
        head = units_of_draft(self.pair, self.pair.draft.head)
        fresh = Alignment(self.pair, self.model, self.limit)
        _, made = fresh.sync(16)
        if self.limit >= 1 << 16:
            assert without_control(said) == without_control(expected)
            if self.target in ("target", "bytes") and self.draft in ("target", "bytes"):
                whole = expected if expected[:1] == head else head + expected
                assert said == whole
                if self.draft == "bytes":
                    assert self.script.tokens == made
            assert said == units_of_draft(self.pair, made)
        else:
            assert len(self.script.tokens) <= self.limit
            tail = said[len(head) :]
            assert expected[len(expected) - len(tail) :] == tail
            assert len(tail) >= min(len(expected) - 1, self.limit // 4 - 1)


def without_control(units):
    """The text; new lines stand for control tokens in a draft that has none of the name."""
    return [u for u in units if 0 <= u < CONTROL and u != 0x0A]


def run(target_, draft_, limit_, of=Session):
    class Case(of):
        target, draft, limit = target_, draft_, limit_

    checks = settings(
        max_examples=examples(8),
        stateful_step_count=20,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],
    )
    Case.TestCase.settings = checks
    Case.TestCase("runTest").runTest()


@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_any_moves_and_proposals(target, draft):
    run(target, draft, 1 << 16)


@pytest.mark.parametrize(("target", "draft"), PAIRS[:2])
def test_in_a_context_that_is_too_short(target, draft):
    run(target, draft, 96)


def test_a_draft_that_knows_little():
    """Nothing that the draft cannot express breaks anything."""

    class KnowsLittle(Session):
        def check_aligned(self):
            self.script.drafts = []
            assert not [*self.session.propose(1)]
            known = self.pair.draft.bytes
            assert all(i in known or i in self.pair.draft.control for i in self.script.tokens)

    run("target", "printable", 1 << 16, KnowsLittle)


BYTES = st.one_of(
    st.binary(max_size=40),
    st.text(max_size=30).map(lambda t: t.encode("utf-8", "surrogatepass")),
    st.text(alphabet="ab <|end>e\u0301é😀\u200d👩 \n", max_size=30).map(str.encode),
)


@pytest.mark.parametrize("name", LOSSLESS)
@given(data=BYTES)
def test_any_bytes_come_back(name, data):
    known = vocabulary(name)
    encoded = known.encode(data)
    pieces = [known.bytes[i] for i in encoded.ids]
    assert b"".join(pieces) == data
    assert encoded.ends == [sum(map(len, pieces[: i + 1])) for i in range(len(pieces))]
    assert encoded.num_exact == len(pieces)
    assert 0 <= encoded.num_settled <= len(pieces)
    assert known.control.keys().isdisjoint(encoded.ids)


@given(data=BYTES)
def test_what_cannot_be_said_is_marked(data):
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
def test_plain_text_is_encoded_as_the_tokenizer_does(name):
    known = vocabulary(name)
    if name in ("target", "bytes"):
        folder = "target" if name == "target" else "draft-bytes"
        tokenizer = Tokenizer.from_file(str(MODELS / folder / "tokenizer.json"))
        expected = tokenizer.encode(TEXT, add_special_tokens=False).ids
        assert known.encode(TEXT.encode()).ids == expected
    # A piece from the middle is a piece: no space is put before it.
    assert known.bytes[known.encode(b"sum").ids[0]][:1] == b"s"


def test_names_of_control_tokens_in_a_text_are_text():
    known = vocabulary("target")
    encoded = known.encode(b"a<|end|><|bos|>b")
    assert not {END, BOS} & set(encoded.ids)
    assert b"".join(known.bytes[i] for i in encoded.ids) == b"a<|end|><|bos|>b"


def test_control_tokens_that_the_file_does_not_mark():
    """A control token named only in the model's configuration is not produced from text either."""
    data = (MODELS / "target" / "tokenizer.json").read_bytes()
    ordinary = Tokenizer.from_buffer(data).encode(" apples", add_special_tokens=False).ids
    assert len(ordinary) == 1
    known = Vocabulary(data, (1,), (0, *ordinary), 4096)
    encoded = known.encode(b"12 apples.")
    assert ordinary[0] not in encoded.ids
    assert b"".join(known.bytes[i] for i in encoded.ids) == b"12 apples."


def test_ids_beyond_the_model_are_not_made():
    data = (MODELS / "target" / "tokenizer.json").read_bytes()
    whole = vocabulary("target").encode(TEXT.encode())
    size = max(whole.ids)
    known = Vocabulary(data, (1,), range(6), size)
    encoded = known.encode(TEXT.encode())
    assert max(encoded.ids) < size
    assert b"".join(known.bytes[i] for i in encoded.ids) == TEXT.encode()


def test_settled_tokens_hardly_change():
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


def test_whole_characters():
    for text in ("", "a", "é", "数", "😀", "ab😀"):
        data = text.encode()
        assert num_whole(data) == len(data)
        for cut in range(1, len(text[-1:].encode())):
            assert num_whole(data[:-cut]) == len(text[:-1].encode())
    assert num_whole(b"\x80\x80") == 2
    assert num_whole(b"a\xff") == 2


def tokenizer_that(*, normalizer=None, model=None):
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
def test_tokenizers_that_lose_plain_text_are_refused(tokenizer):
    with pytest.raises(InvalidArgumentError, match="does not reproduce plain text"):
        made(tokenizer, 0, range(1))


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff\xfe", b"null", b"[" * 100_000, b'{"model":{"type":"X"}}',
     b'{"model":{"type":"Unigram","vocab":[],"unk_id":null}}',
     b'{"model":{"type":"WordLevel","vocab":{},"unk_token":"u"}}'],
)  # fmt: skip
def test_nonsense_is_refused(data):
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json"):
        Vocabulary(data, (1,), (), 100)


def test_padding_truncation_and_dropout_do_not_reach_the_text():
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
