"""Tokenizers of several kinds, including the bundled ones, as translation sees them."""

import json
from functools import cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from draft_service.translation import Translator, Vocabulary
from draft_service.translation.alignment import CONTROL
from flyspec.bundled import MODELS

BOS, EOS, PAD, USER, ASSISTANT, END = range(6)
TEXT = (
    "Tom has 12 apples and gives 3 of them to Ann. How many apples are left?\n"
    "We subtract: 12 - 3 = 9, therefore nothing is missing from the \"sum\".\n#### 9\n"
    "Naïve café, Żółć, 数学のテスト, 😀😃 and 👩‍👩‍👧; e\u0301 is not é.\n"
    "def total(values):\n    result = [0, {1: 2}];  # dogs & cats\n\treturn result + 1\n"
)  # fmt: skip
PRINTABLE = [chr(c) for c in range(0x20, 0x7F)] + ["\n", "\t"]


def bundled(model):
    """The tokenizer of a bundled model."""
    data = (MODELS / model / "tokenizer.json").read_bytes()
    size = Tokenizer.from_buffer(data).get_vocab_size(True)
    return Vocabulary(data, (EOS, END), range(6), size)


def made(tokenizer, eos, control):
    data = tokenizer.to_str().encode()
    return Vocabulary(data, (eos,), control, tokenizer.get_vocab_size(True))


def train(tokenizer, specials, alphabet, size=420):
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=specials, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 4, trainer)


def byte_level(normalizer=None):
    """Like GPT-2's, with its own control tokens, optionally with a normalizer."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.ByteLevel()
    train(tokenizer, ["<|endoftext|>", "<|im_start|>"], pre_tokenizers.ByteLevel.alphabet())
    return made(tokenizer, 0, range(2))


def byte_fallback():
    """Like Llama 2's: a space before the text, no pre-tokenizer, bytes for unknown characters."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    train(trained, ["<unk>", "<s>", "</s>"], [*PRINTABLE, "▁"], 260)
    spec = json.loads(trained.to_str())
    vocab = dict(spec["model"]["vocab"])
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    merges = [tuple(m) for m in spec["model"]["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made(tokenizer, 2, range(3))


def printable_only():
    """Knows ASCII and an unknown token, no bytes."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=[*PRINTABLE, "▁"],
        show_progress=False,
    )
    ascii_only = "".join(c for c in TEXT if c.isascii())
    tokenizer.train_from_iterator([ascii_only] * 4, trainer)
    return made(tokenizer, 2, range(1, 3))


BUILDERS = {
    "target": lambda: bundled("target"),
    "bytes": lambda: bundled("draft-bytes"),
    "byte-level": byte_level,
    "nfc": lambda: byte_level(normalizers.NFC()),
    "byte-fallback": byte_fallback,
    "printable": printable_only,
}
LOSSLESS = ["target", "bytes", "byte-level", "nfc", "byte-fallback"]


@cache
def vocabulary(name):
    """One of `BUILDERS`."""
    return BUILDERS[name]()


@cache
def translator(target, draft):
    """From one of `BUILDERS` to another."""
    return Translator(vocabulary(target), vocabulary(draft))


def units_of_draft(translator, draft_ids):
    """A draft's tokens in units of the target's stream; -1 for what has no counterpart."""
    units = []
    for token in draft_ids:
        if token in translator.draft.control:
            control = translator.control_in_target(token, None)
            units.append(-1 if control is None else CONTROL + control)
        else:
            units += translator.draft.bytes[token]
    return units


def units_of_target(vocabulary, token_ids):
    units = []
    for token in token_ids:
        units += [CONTROL + token] if token in vocabulary.control else vocabulary.bytes[token]
    return units


def said_by_draft(alignment, translator):
    """The draft's text without control tokens."""
    known = translator.draft.bytes
    return b"".join(known.get(token, b"") for token in alignment.draft_ids)
