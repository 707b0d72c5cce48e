"""transformers' ways to generate, in a process of their own.

So neither their threads nor this interpreter's lock disturb what is measured besides. Time is
measured there, around `generate` alone.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

_GENERATION_FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule",
                      "assistant_confidence_threshold")  # fmt: skip
"""What transformers takes from the assistant's own configuration rather than from the call."""


@dataclass(frozen=True)
class PeerSetup:
    """How a peer generates. `assistant` is the draft model's own configuration, if it drafts.

    `arguments` are passed to `generate`.
    """

    dtype: str = "float32"
    threads: int = 1
    assistant: dict[str, Any] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        said = {**self.assistant, **self.arguments}
        k, schedule, confidence = (said.pop(name, None) for name in _GENERATION_FIELDS)
        words = [self.dtype, f"{self.threads} thread{'s' * (self.threads != 1)}"]
        if k is not None:
            words.append(f"K {k} {schedule}" + (f", confidence {confidence}" if confidence else ""))
        words += [f"{name.removeprefix('assistant_')} {value}" for name, value in said.items()]
        return ", ".join(words)


@dataclass(frozen=True)
class PeerAnswer:
    """The output, and the seconds from the call to the first and to the last token."""

    token_ids: Sequence[int]
    seconds: float
    first_token_s: float | None


class _FirstToken:
    """A streamer of transformers': it gets the prompt, then the tokens as they come."""

    def __init__(self) -> None:
        self.puts = 0
        self.at: float | None = None

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


@cache
def _model(directory: str, dtype: str, device: str) -> Any:
    from flyspec.bench.reference import Reference

    return Reference(directory, dtype, device=device)


def redirect_output(log: str) -> None:
    """Send all output of this process to a file."""
    with open(log, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def answer(
    model: str,
    draft: str,
    device: str,
    setup: PeerSetup,
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    ignore_eos: bool,
) -> PeerAnswer:
    """Continue a prompt. `draft` is a model's directory, if the setup drafts."""
    import torch

    target = _model(model, setup.dtype, device)
    how: dict[str, Any] = dict(setup.arguments)
    if setup.assistant:
        how["assistant_model"] = _model(draft, setup.dtype, device).module
        for name in _GENERATION_FIELDS:
            setattr(how["assistant_model"].generation_config, name, setup.assistant.get(name))
    if torch.get_num_threads() != setup.threads:
        torch.set_num_threads(setup.threads)
    streamer = _FirstToken()
    begin = time.perf_counter()
    token_ids = target.generate(prompt_token_ids, max_tokens, ignore_eos, streamer=streamer, **how)
    seconds = time.perf_counter() - begin
    return PeerAnswer(token_ids, seconds, streamer.at and streamer.at - begin)
