"""Splits of text before a byte-level BPE merges it, by llama.cpp's name for them in a GGUF file.

A GGUF file has only a name (`tokenizer.ggml.pre`); llama.cpp knows the patterns that it stands for
(`llama_vocab::impl::load` in src/llama-vocab.cpp). The patterns here are those of the models' own
tokenizers, in the syntax of the library tokenizers. What results is compared with llama.cpp's own
tokens before a model serves (`tokenizer.check`).
"""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, PreTokenizer, Sequence, Split

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

    `whole_words`: a piece that is a token as it is needs no merges.
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


def known(name: str) -> bool:
    """True if the patterns of a pre-tokenizer are known by llama.cpp's name for it."""
    return name in _BY_NAME


def names() -> list[str]:
    """Return llama.cpp's names of the known pre-tokenizers."""
    return sorted(_BY_NAME)


def pre_tokenizer(name: str) -> PreTokenizer:
    """Return the pre-tokenizer of this name; pieces come in the byte-level alphabet."""
    splits = [Split(Regex(pattern), "isolated") for pattern in _BY_NAME[name].patterns]
    return Sequence([*splits, ByteLevel(add_prefix_space=False, use_regex=False)])


def keeps_whole_words(name: str) -> bool:
    """True if a piece that is a token as it is needs no merges (`ignore_merges` of BPE)."""
    return _BY_NAME[name].whole_words
