"""Which model the target is: what its replicas must have in common, and when it is another one.

Replicas of another model, or of the same one that computes otherwise, change the text of `exact`
without a word. So they get no work, until most replicas are of that kind: then the operator is
replacing the target, and new generations follow. Those under way stay with the model that they
began with.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

from flyspec.tokenizer import Tokenizer
from flyspec.values.admin import ModelInfo, TokenizerBundle, VerifyServiceInfo

REMEMBERED_S, EXPECTED_S = 10.0, 600.0
"""So long a replica that is silent counts as one of its kind: one that is gone from its name's
addresses, and one that is known to be about to come back."""
_FACTS = (
    ("weights_fingerprint", "weights have the fingerprint"),
    ("tokenizer_fingerprint", "tokenizer has the fingerprint"),
    ("vocab_size", "vocabulary has the size"),
    ("context_length", "context has the length"),
    ("num_parameters", "number of parameters is"),
)


@dataclass(frozen=True, slots=True)
class Target:
    """The target as the orchestrator knows it."""

    info: VerifyServiceInfo
    tokenizer: Tokenizer
    bundle: TokenizerBundle


def is_same_model(one: ModelInfo, other: ModelInfo) -> bool:
    """Whether both have the same weights, and differ in how they compute at most."""
    return all(getattr(one, name) == getattr(other, name) for name, _ in _FACTS)


def difference(known: ModelInfo, other: ModelInfo, allow_mixed_numerics: bool) -> str:
    """What keeps `other` from standing in for `known`; empty if nothing does."""
    for name, fact in _FACTS:
        mine, theirs = getattr(known, name), getattr(other, name)
        if mine != theirs:
            return f"its {fact} {theirs or 'nothing'}, that of {known.name} {mine or 'nothing'}"
    if known.numerics != other.numerics and not allow_mixed_numerics:
        return (
            f"it computes otherwise ({other.numerics or 'unknown'}) than the others "
            f"({known.numerics or 'unknown'}), so exact text could differ; --allow-mixed-numerics "
            "uses it all the same"
        )
    return ""


class Kinds:
    """What each replica said last that it is, and how many there are of a kind."""

    def __init__(self, allow_mixed_numerics: bool) -> None:
        self._mixed = allow_mixed_numerics
        self._said: dict[str, tuple[float, ModelInfo]] = {}

    def note(self, address: str, model: ModelInfo) -> None:
        """The replica at that address has just said that it is this."""
        self._said[address] = time.monotonic(), model

    def count(self, model: ModelInfo, expected: Collection[str]) -> int:
        """How many are like `model`; of the addresses `expected`, silent ones count for longer."""
        now = time.monotonic()
        return sum(
            not difference(model, said, self._mixed)
            for address, (when, said) in self._said.items()
            if now - when < (EXPECTED_S if address in expected else REMEMBERED_S)
        )
