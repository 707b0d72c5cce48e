"""The tokenizer of the tiny models."""

from __future__ import annotations

from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import TokenizerBundle
from tests.tiny import make_tokenizer

_FAST = make_tokenizer()
BUNDLE = TokenizerBundle(
    _FAST.backend_tokenizer.to_str().encode(), "f", eos_token_ids=(1,), control_token_ids=(0, 1, 2)
)
TOKENIZER = Tokenizer(BUNDLE)
