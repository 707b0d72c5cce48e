"""The tokenizer of a GGUF file, as the library tokenizers and the orchestrator read it.

A file has the vocabulary with the type of each token, and merges (byte-level BPE: GPT-2's) or
scores (SentencePiece's BPE: Llama 2's). llama.cpp's vocabulary, of the loaded model, says which
tokens begin and end a text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from enum import IntEnum

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from transformers.convert_slow_tokenizer import generate_merges

from flyspec.engine.llama_cpp import pre_tokenizers
from flyspec.engine.llama_cpp.binding import GgufVocabulary
from flyspec.engine.llama_cpp.gguf_file import GgufFile
from flyspec.engine.native.sample import TEXT
from flyspec.errors import ConfigError
from flyspec.prefix import num_same
from flyspec.tokenizer import fingerprint
from flyspec.values.admin import TokenizerBundle

log = logging.getLogger(__name__)

_SPACE = "\u2581"


class TokenType(IntEnum):
    """Types of tokens in `tokenizer.ggml.token_type` (llama.cpp's `llama_token_type`)."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def read_bundle(file: GgufFile, vocabulary: GgufVocabulary) -> TokenizerBundle:
    """Return the tokenizer, chat templates and special tokens. Raises `ConfigError`."""
    tokens: list[str] = file.get("tokenizer.ggml.tokens") or []
    kinds: list[int] = file.get("tokenizer.ggml.token_type") or [TokenType.NORMAL] * len(tokens)
    if not tokens:
        raise ConfigError(f"--model {file.path}: has no vocabulary")
    tokenizer = _tokenizer(file, tokens, kinds, vocabulary)
    eos = sorted(i for i in range(len(tokens)) if vocabulary.ends(i))
    special = (TokenType.CONTROL, TokenType.UNKNOWN)
    control = {i for i, kind in enumerate(kinds) if kind in special} | set(eos)
    ids = {"bos": vocabulary.bos, "eos": vocabulary.eos, "pad": vocabulary.pad}
    templates = {**file.chat_templates}
    default = templates.pop("", "")
    pad = vocabulary.pad
    return TokenizerBundle(
        tokenizer_json=tokenizer.to_str().encode(),
        fingerprint=fingerprint(tokenizer, None if pad in eos else pad),
        eos_token_ids=tuple(eos),
        control_token_ids=tuple(sorted(control)),
        bos_token_id=vocabulary.bos,
        chat_template=default,
        generation_config_json=json.dumps({"eos_token_id": eos}),
        named_chat_templates=tuple(sorted(templates.items())),
        special_tokens=tuple(
            (f"{name}_token", tokens[i]) for name, i in sorted(ids.items()) if i is not None
        ),
    )


def check(file: GgufFile, vocabulary: GgufVocabulary, bundle: TokenizerBundle) -> None:
    """Compare the tokens of a sample text with llama.cpp's own; log a warning if they differ.

    Texts are encoded by the orchestrator, with the bundle: llama.cpp only sees tokens. So other
    tokens are no error, but not what the model was trained on either.
    """
    ours = Tokenizer.from_buffer(bundle.tokenizer_json).encode(TEXT).ids
    theirs = vocabulary.encode(TEXT)
    if ours != theirs:
        place = num_same(ours, theirs)
        log.warning(
            "%s: the tokenizer made from the file encodes a sample text in %d tokens, llama.cpp in "
            "%d, and they differ from token %d on; give prompts as token ids, or serve the "
            "safetensors checkpoint", file.path.name, len(ours), len(theirs), place,
        )  # fmt: skip


def _tokenizer(
    file: GgufFile, tokens: list[str], kinds: list[int], vocabulary: GgufVocabulary
) -> Tokenizer:
    model = str(file.get("tokenizer.ggml.model", ""))
    # Rows of the output layer without a token are named [PAD123].
    there = {
        token: i
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if not (kind == TokenType.UNUSED and token == f"[PAD{i}]")
    }
    if model == "gpt2":
        tokenizer = _byte_level(file, there)
    elif model == "llama":
        tokenizer = _sentence_piece(file, tokens, there, kinds)
    else:
        raise ConfigError(
            f"--model {file.path}: its tokenizer is of kind {model!r}, and only byte-level BPE "
            "('gpt2') and SentencePiece's BPE ('llama') are read; serve the safetensors checkpoint"
        )
    added = (TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    tokenizer.add_tokens([
        AddedToken(token, special=kinds[i] != TokenType.USER_DEFINED, normalized=False)
        for token, i in there.items() if kinds[i] in added
    ])  # fmt: skip
    around = [*_ids(vocabulary.adds_bos, vocabulary.bos), None,
              *_ids(vocabulary.adds_eos, vocabulary.eos)]  # fmt: skip
    if len(around) > 1:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=["$A" if i is None else tokens[i] for i in around],
            special_tokens=[(tokens[i], i) for i in {*around} if i is not None],
        )
    return tokenizer


def _ids(added: bool, token_id: int | None) -> Iterator[int]:
    if added and token_id is not None:
        yield token_id


def _byte_level(file: GgufFile, vocabulary: dict[str, int]) -> Tokenizer:
    name = str(file.get("tokenizer.ggml.pre", "default"))
    if not pre_tokenizers.known(name):
        raise ConfigError(
            f"--model {file.path}: how its tokenizer splits text is unknown: {name!r}; known are "
            f"{', '.join(pre_tokenizers.names())}; serve the safetensors checkpoint instead"
        )
    merges = [tuple(pair.split(" ", 1)) for pair in file.get("tokenizer.ggml.merges") or ()]
    whole = pre_tokenizers.keeps_whole_words(name)
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=whole))
    tokenizer.pre_tokenizer = pre_tokenizers.pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(
    file: GgufFile, tokens: list[str], vocabulary: dict[str, int], kinds: list[int]
) -> Tokenizer:
    """Return SentencePiece's BPE, whose merges follow from the scores of what they make."""
    scores: list[float] = file.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    normal = {t: scores[i] for t, i in vocabulary.items() if kinds[i] == TokenType.NORMAL}
    unknown = next((t for t, i in vocabulary.items() if kinds[i] == TokenType.UNKNOWN), None)
    tokenizer = Tokenizer(
        BPE(
            vocab=vocabulary,
            merges=generate_merges(vocabulary, normal),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(file.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    first = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, spaces])
    last = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer
