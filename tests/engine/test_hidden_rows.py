"""Hidden rows from a packed step equal those of transformers' own `output_hidden_states`."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from flyspec.bundled import TARGET
from flyspec.engine.captured.graphs import eagerly
from flyspec.engine.loading import load_model
from flyspec.engine.model import Rows, Step
from flyspec.engine.native.library import find
from flyspec.engine.native.model import NativeModel
from flyspec.engine.runner import ModelRunner, Paging

LAYERS = (3, 0)
"""Not sorted: they come in the requested order."""


def test_hidden_rows_equal_transformers() -> None:
    target, dtype = str(TARGET), "float64"
    model = load_model(target, "cpu", dtype).model
    last = model.config.num_hidden_layers
    runner = ModelRunner(load_model(target, "cpu", dtype), 3)
    texts = [[(11 * i * i + j) % 250 + 3 for i in range(40)] for j in range(3)]
    # Cached prefixes of two lengths, one of them with tokens that are rolled back; a whole prompt.
    runner.forward([Step(0, 0, texts[0][:25], 0), Step(2, 0, [*texts[2][:30], 7, 7, 7], 0)])
    steps = [
        Step(2, 30, texts[2][30:], 5),
        Step(1, 0, texts[1], 1),
        Step(0, 25, texts[0][25:], 15),
    ]
    layers = (*LAYERS, last)
    found = runner.forward([step._replace(hidden_layers=layers) for step in steps])
    plain = runner.forward(steps)
    for step, rows, without in zip(steps, found, plain, strict=True):
        with torch.inference_mode():
            text = torch.tensor([texts[step.slot]])
            own = model(text, use_cache=False, output_hidden_states=True).hidden_states
        assert without.hidden == ()
        assert torch.equal(rows.logits, without.logits)
        assert len(rows.hidden) == len(layers)
        for layer, hidden in zip(layers, rows.hidden, strict=True):
            expected = own[layer][0, -step.num_logits :]
            assert hidden.shape == expected.shape
            if layer == 0:
                assert torch.equal(hidden, expected)
            scale = float(expected.abs().max())
            torch.testing.assert_close(hidden, expected, rtol=0, atol=1e-10 * scale)


@pytest.mark.parametrize("kind", ["slots", "blocks", "fixed", "native"])
def test_hidden_rows_need_no_logits(kind: str) -> None:
    """A prompt's rows can be read without computing its logits."""
    loaded = load_model(str(TARGET), "cpu", "bfloat16" if kind == "native" else "float32")
    if kind == "native":
        if isinstance(library := find(), str):
            pytest.skip(library)
        runner: Any = NativeModel(loaded, 2, library)
    else:
        paging = {"slots": None, "blocks": Paging(16), "fixed": Paging(16, attention="sdpa")}
        runner = ModelRunner(loaded, 2, paging=paging[kind])
        if kind == "fixed":
            runner.accelerate(eagerly, compiled=False)
            runner.cache.forget()
    # More rows than the native step runs at once.
    text = [(11 * i * i) % 250 + 3 for i in range(300)]
    layers, last = (2, -1), [*range(297, 300)]
    (whole,) = runner.forward([Step(0, 0, text, len(text), layers)])
    runner.cache.forget()
    whole = Rows(whole.logits.clone(), tuple(rows.clone() for rows in whole.hidden))
    steps = [
        Step(1, 0, text[:200], 0, layers, 200),
        Step(0, 0, text[::-1], 2),
    ]
    first, other = runner.forward(steps)
    assert first.logits.shape[0] == 0
    assert other.hidden == ()
    found = [rows.clone() for rows in first.hidden]
    (rest,) = runner.forward([Step(1, 200, text[200:], 3, layers, 90)])
    close = partial(torch.testing.assert_close, rtol=0.02, atol=0.05 if kind == "native" else 1e-3)
    close(rest.logits, whole.logits[last])
    for rows, more, expected in zip(found, rest.hidden, whole.hidden, strict=True):
        assert (rows.shape[0], more.shape[0]) == (200, 90)
        close(rows, expected[:200])
        close(more, expected[210:])


def test_a_layer_that_there_is_not_is_refused() -> None:
    runner = ModelRunner(load_model(str(TARGET), "cpu", "float32"), 1)
    layers = runner.cache.kv_layers
    with pytest.raises(ValueError, match=f"between 0 and {len(layers)}"):
        runner.forward([Step(0, 0, [1], hidden_layers=(len(layers) + 1,))])
