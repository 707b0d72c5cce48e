"""Trials of the native step that were passed on this machine, so as not to repeat them.

A record is found by everything that a trial depends on: weights, tokenizer, compiled step, this
package's sources, libraries, processor. It holds a digest of the first logits of the trial's text.
Only a model that computes the same bits again goes without a trial.
"""

from __future__ import annotations

import hashlib
import platform
from functools import lru_cache
from pathlib import Path

import torch
import transformers

from flyspec.engine.loading import LoadedModel
from flyspec.engine.native.library import processor_flags
from flyspec.engine.native.model import NativeModel
from flyspec.engine.native.trial import TrialOutcome, first_logits, sample
from flyspec.remembered import recall, remember

_KIND = "native-trials"


def has_passed(model: NativeModel, loaded: LoadedModel) -> bool:
    """True if this model has passed its trial before, and computes the same."""
    known = recall(_KIND, *_key(model, loaded)) if loaded.info.weights_fingerprint else None
    return isinstance(known, dict) and known.get("digest") == _digest(model, loaded)


def note_passed(model: NativeModel, loaded: LoadedModel, outcome: TrialOutcome) -> None:
    if loaded.info.weights_fingerprint:
        record = {"digest": _digest(model, loaded), **outcome._asdict()}
        remember(_KIND, record, *_key(model, loaded))


def _digest(model: NativeModel, loaded: LoadedModel) -> str:
    rows = first_logits(model, sample(loaded))
    return hashlib.sha256(rows.contiguous().numpy().tobytes()).hexdigest()


def _key(model: NativeModel, loaded: LoadedModel) -> tuple[object, ...]:
    info = loaded.info
    return (
        info.weights_fingerprint, info.tokenizer_fingerprint, info.context_length,
        model.library.name, model.threads, _sources(),
        torch.__version__, transformers.__version__,
        platform.machine(), sorted(processor_flags()),
    )  # fmt: skip


@lru_cache(maxsize=1)
def _sources() -> str:
    """Digest of this package: its modules and what was compiled."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.iterdir()):
        if path.suffix in (".py", ".so"):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
