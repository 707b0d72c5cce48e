"""The tokenizer of a GGUF file, as the library tokenizers and the orchestrator read it.

A file has the vocabulary with the type of each token, and merges (byte-level BPE: GPT-2's) or
scores (SentencePiece's BPE: Llama 2's). llama.cpp's vocabulary, of the loaded model, says which
tokens begin and end a text.

Of the splits of text before a byte-level BPE merges it, a file has only llama.cpp's name
(`tokenizer.ggml.pre`), which llama.cpp knows the patterns for (`llama_vocab::impl::load` in
src/llama-vocab.cpp). The patterns here are those of the models' own tokenizers, in the syntax of
the library tokenizers. What results is compared with llama.cpp's own tokens before a model serves
(`check`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split
from transformers.convert_slow_tokenizer import generate_merges

from flyspec.engine.llama_cpp.binding import GgufVocabulary
from flyspec.engine.llama_cpp.gguf_file import GgufFile
from flyspec.engine.native.sample import TEXT
from flyspec.errors import ConfigError
from flyspec.prefix import num_same
from flyspec.tokenizer import fingerprint
from flyspec.values.admin import TokenizerBundle

log = logging.getLogger(__name__)

_SPACE = "\u2581"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ENGLISH = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_ENGLISH}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|"
_CASED_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
    r" ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
)


class _Known(NamedTuple):
    """Names that mean the same patterns, applied one after the other to the pieces so far.

    `whole_words`: a piece that is a token as it is needs no merges (`ignore_merges` of BPE).
    """

    names: str
    patterns: tuple[str, ...]
    whole_words: bool = False


_KNOWN = (
    _Known("gpt-2 phi-2 gigachat mellum exaone4 mpt olmo jais trillion granite-docling", (_GPT2,)),
    _Known("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
           (r"\p{N}", _GPT2)),
    _Known("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 glm4 glm5",
           (_WORDS + r"\p{N}{1,3}|" + _SIGNS + _SPACES,), whole_words=True),
    _Known("dbrx smaug-bpe chatglm-bpe", (_WORDS + r"\p{N}{1,3}|" + _SIGNS + _SPACES,)),
    _Known("qwen2 stablelm2 hunyuan megrez deepseek-r1-qwen solar-open grok-2",
           (_WORDS + r"\p{N}|" + _SIGNS + _SPACES,)),
    _Known("tekken", (_CASED % ("", "") + r"\p{N}|" + _CASED_SIGNS + _SPACES,), whole_words=True),
    _Known("gpt-4o llama4 kanana2 minimax-m2",
           (_CASED % ((_ENGLISH + "?",) * 2) + r"\p{N}{1,3}|" + _CASED_SIGNS + _SPACES,)),
    _Known("deepseek-v3 hunyuan-dense joyai-llm",
           (r"\p{N}{1,3}", "[一-龥\u3040-ゟ゠-ヿ]+", _DEEPSEEK)),
)  # fmt: skip

_BY_NAME = {name: known for known in _KNOWN for name in known.names.split()}


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of this name; pieces come in the byte-level alphabet."""
    splits = [Split(Regex(pattern), "isolated") for pattern in _BY_NAME[name].patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


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
    known = _BY_NAME.get(name)
    if known is None:
        raise ConfigError(
            f"--model {file.path}: how its tokenizer splits text is unknown: {name!r}; known are "
            f"{', '.join(sorted(_BY_NAME))}; serve the safetensors checkpoint instead"
        )
    merges = [tuple(pair.split(" ", 1)) for pair in file.get("tokenizer.ggml.merges") or ()]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=known.whole_words))
    tokenizer.pre_tokenizer = pre_tokenizer(name)
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
