"""The identity of the target: what its replicas must share, and when it has been replaced.

A replica with another model, or with the same model but different numerics, would silently change
the output of `exact`. Such replicas get no work until they are in the majority: then the operator
is replacing the target, and new generations use the new one. Running generations stay with the
model they started with.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import ModelInfo, TokenizerBundle, VerifyServiceInfo

REMEMBERED_S, EXPECTED_S = 10.0, 600.0
"""Seconds that a silent replica still counts towards its kind: one no longer listed at its
address, and one that is listed and so expected back."""
_FACTS = (
    ("weights_fingerprint", "weights fingerprint"),
    ("tokenizer_fingerprint", "tokenizer fingerprint"),
    ("vocab_size", "vocabulary size"),
    ("context_length", "context length"),
    ("num_parameters", "number of parameters"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The target: its service's description and its tokenizer."""

    info: VerifyServiceInfo
    tokenizer: Tokenizer
    bundle: TokenizerBundle


def difference(known: ModelInfo, other: ModelInfo, allow_mixed_numerics: bool) -> str:
    """Return why `other` cannot replace `known`; empty if it can."""
    for name, fact in _FACTS:
        mine, theirs = getattr(known, name), getattr(other, name)
        if mine != theirs:
            return f"its {fact} is {theirs or 'unset'}, that of {known.name} is {mine or 'unset'}"
    if known.numerics != other.numerics and not allow_mixed_numerics:
        return (
            f"its numerics ({other.numerics or 'unknown'}) differ from the others' "
            f"({known.numerics or 'unknown'}), so exact output could differ; to use it anyway, "
            "set --allow-mixed-numerics"
        )
    return ""


class Kinds:
    """The model that each replica last reported, and how many replicas run the same."""

    def __init__(self, allow_mixed_numerics: bool) -> None:
        self._mixed = allow_mixed_numerics
        self._said: dict[str, tuple[float, ModelInfo]] = {}

    def note(self, address: str, model: ModelInfo) -> None:
        self._said[address] = time.monotonic(), model

    def count(self, model: ModelInfo, expected: Collection[str]) -> int:
        """Count the replicas equivalent to `model`; silent ones count longer if in `expected`."""
        now = time.monotonic()
        return sum(
            not difference(model, said, self._mixed)
            for address, (when, said) in self._said.items()
            if now - when < (EXPECTED_S if address in expected else REMEMBERED_S)
        )
