"""The trial of the native step against the transformers module that it replaces.

Both read a sample text. The module's float32 logits are the reference; its own bfloat16 logits show
how close is close enough. The float32 run converts one layer's weights at a time, so that a large
model needs little additional memory.

Trials that were passed on this machine are not repeated. A record is found by everything that a
trial depends on: weights, tokenizer, compiled step, this package's sources, libraries, processor.
It holds a digest of the first logits of the trial's text. Only a model that computes the same bits
again goes without a trial.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import linear

from flyspec.engine.loading import LoadedModel
from flyspec.engine.model import Model, Step
from flyspec.engine.native.library import processor_flags
from flyspec.engine.native.model import NativeModel
from flyspec.engine.native.sample import TEXT
from flyspec.remembered import recall, remember

DIFFERENCE_FACTOR = 1.1
"""Maximum mean difference of logits, relative to that of transformers' bfloat16."""
SAME_TOKENS, SAME_CLEAR_TOKENS = 0.99, 0.999
"""Minimum share of rows whose most likely token is float32's: of all rows, and of those without a
near-tie. Of all rows, `FEW` may always differ, and as many as for transformers' bfloat16."""
FEW = 2
TIE_SHARE = 2.0**-7
"""A near-tie is closer than this share of the larger logit, bfloat16's resolution there..."""
TIE_DIFFERENCES = 8.0
"""...or than this many mean differences of transformers' bfloat16."""

_WORK = 6.4e10
_MOST_ROWS, _FEWEST_ROWS = 768, 32
_HEAD_ROWS = 16384
_FEW_ROWS = 12
_KIND = "native-trials"


class TrialOutcome(NamedTuple):
    """The result of a trial over `rows` rows; differences are means over logits.

    `own` is transformers' bfloat16; `other` tokens are those that differ from float32's.
    """

    rows: int
    difference: float
    own_difference: float
    other_tokens: int
    own_other_tokens: int
    clear_rows: int
    other_clear_tokens: int
    independent: bool

    def refusal(self) -> str | None:
        """Return why the native step must not serve; None if it may."""
        if not self.difference <= DIFFERENCE_FACTOR * self.own_difference:
            return (
                f"its logits differ from float32 by {self.difference:.2g} on average, those of "
                f"transformers' bfloat16 by {self.own_difference:.2g}"
            )
        allowed = max(FEW, (1 - SAME_TOKENS) * self.rows, self.own_other_tokens)
        if self.other_tokens > allowed:
            return f"{self.other_tokens} of {self.rows} sample tokens differ from float32's"
        if self.other_clear_tokens > (1 - SAME_CLEAR_TOKENS) * self.clear_rows:
            return (
                f"{self.other_clear_tokens} of {self.clear_rows} sample tokens without a near-tie "
                "differ from float32's"
            )
        if not self.independent:
            return "its logits depend on what else is in the step"
        return None


def try_out(model: Model, loaded: LoadedModel) -> TrialOutcome:
    """Run the sample through both models. Raises what the model raises."""
    ids = sample(loaded)
    exact, own = _float32_logits(loaded.model, ids), _own_logits(loaded.model, ids)
    (rows,) = _in_slot(model, [ids], len(ids))
    top, near = exact.topk(2).values.unbind(dim=-1)
    own_difference = float((own - exact).abs().mean())
    tie = torch.maximum(TIE_SHARE * top.abs(), torch.tensor(TIE_DIFFERENCES * own_difference))
    clear = top - near > tie
    other = rows.argmax(dim=-1) != exact.argmax(dim=-1)
    return TrialOutcome(
        len(ids),
        float((rows - exact).abs().mean()),
        own_difference,
        int(other.sum()),
        int((own.argmax(dim=-1) != exact.argmax(dim=-1)).sum()),
        int(clear.sum()),
        int((other & clear).sum()),
        _independent(model, ids, rows),
    )


def sample(loaded: LoadedModel) -> list[int]:
    """Return token ids of the sample text, fewer for larger models."""
    info, bundle = loaded.info, loaded.tokenizer
    rows = int(_WORK / max(1, loaded.model.num_parameters()))
    rows = min(max(rows, _FEWEST_ROWS), _MOST_ROWS, info.context_length)
    ids: list[int] = []
    if bundle.tokenizer_json:
        tokenizer = Tokenizer.from_str(bundle.tokenizer_json.decode())
        tokenizer.no_truncation()
        ids = [i for i in tokenizer.encode(TEXT).ids if i < info.vocab_size]
    ids = ids or [(7 * i * i + 3 * i + 1) % min(info.vocab_size, 251) for i in range(rows)]
    return ids[:rows]


def _in_slot(model: Model, pieces: Sequence[list[int]], num_logits: int) -> list[Tensor]:
    """The rows of each piece of a sequence, run in one slot."""
    at, found = 0, []
    with model.cache.borrowed() as (slot,):
        for piece in pieces:
            (rows,) = model.forward([Step(slot, at, piece, min(num_logits, len(piece)))])
            found.append(rows.logits)
            at += len(piece)
    return found


def first_logits(model: Model, ids: list[int]) -> Tensor:
    """Return the logits of a few tokens, run one at a time."""
    return torch.cat(_in_slot(model, [[token] for token in ids[:_FEW_ROWS]], 1))


def _independent(model: Model, ids: list[int], rows: Tensor) -> bool:
    """True if a few rows are the same one token at a time, and with a neighbour."""
    few = min(_FEW_ROWS, len(ids))
    if not torch.equal(first_logits(model, ids), rows[:few]):
        return False
    if not model.cache.num_free > 1:
        return True
    with model.cache.borrowed(2) as (one, other):
        steps = [Step(one, 0, ids[::-1][: few + 5]), Step(other, 0, ids[:few], few)]
        return torch.equal(model.forward(steps)[1].logits, rows[:few])


@torch.no_grad()
def _own_logits(model: Any, ids: list[int]) -> Tensor:
    """[tokens, vocab] of the unmodified module."""
    logits: Tensor = model(torch.tensor([ids]), use_cache=False).logits[0]
    return logits.float()


@torch.no_grad()
def _float32_logits(model: Any, ids: list[int]) -> Tensor:
    """[tokens, vocab] of the module computed in float32."""
    core = model.model
    with _widened(core):
        hidden = core(torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    weight = model.lm_head.weight
    return torch.cat([linear(hidden, part.float()) for part in weight.split(_HEAD_ROWS)], dim=-1)


@contextmanager
def _widened(core: Any) -> Iterator[None]:
    """Make each layer compute in float32, converting its weights only while it runs."""
    handles = [core.embed_tokens.register_forward_hook(lambda _, __, output: output.float())]
    for part in (*core.layers, core.norm):
        before, after = partial(_cast, torch.float32), partial(_cast, core.dtype)
        handles.append(part.register_forward_pre_hook(before))
        handles.append(part.register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _cast(dtype: torch.dtype, module: Any, *_: Any) -> None:
    module.to(dtype)


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
