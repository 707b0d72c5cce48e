"""transformers' ways to generate, in a process of their own: `python -m flyspec.bench.peer_worker`.

So neither their threads nor this interpreter's lock is in the way of what is measured beside them.
A line of JSON on standard input is a `PeerRequest`, the line that answers it on standard output a
`PeerAnswer`, or `{"error": TEXT}`. The time is taken here, around `generate` alone.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from flyspec.errors import FlyspecError

_GENERATION_FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule",
                      "assistant_confidence_threshold")  # fmt: skip
"""What transformers takes from the assistant's own configuration rather than from the call."""


@dataclass(frozen=True)
class PeerSetup:
    """How a peer generates. `assistant` is the draft model's own configuration, if it drafts.

    `arguments` go to `generate` as they are.
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
class PeerRequest:
    """A prompt, and how to continue it. `draft` is a model's directory, if a setup has one."""

    model: str
    draft: str
    device: str
    setup: PeerSetup
    prompt_token_ids: Sequence[int]
    max_tokens: int
    ignore_eos: bool


@dataclass(frozen=True)
class PeerAnswer:
    """What came, and when: seconds from the call to the first token, and to the last."""

    token_ids: Sequence[int]
    seconds: float
    first_token_s: float | None


class _FirstToken:
    """A streamer of transformers', which is given the prompt and then what follows as it comes."""

    def __init__(self) -> None:
        self.puts = 0
        self.at: float | None = None

    def put(self, value: Any) -> None:
        self.puts += 1
        if self.puts == 2:
            self.at = time.perf_counter()

    def end(self) -> None:
        pass


class _Peers:
    """Models by directory and data type, loaded when first asked for."""

    def __init__(self) -> None:
        self._loaded: dict[tuple[str, str, str], Any] = {}

    def _model(self, directory: str, dtype: str, device: str) -> Any:
        from flyspec.bench.reference import Reference

        key = (directory, dtype, device)
        if key not in self._loaded:
            self._loaded[key] = Reference(directory, dtype, device=device)
        return self._loaded[key]

    def answer(self, request: PeerRequest) -> PeerAnswer:
        import torch

        setup = request.setup
        target = self._model(request.model, setup.dtype, request.device)
        how: dict[str, Any] = dict(setup.arguments)
        if setup.assistant:
            draft = self._model(request.draft, setup.dtype, request.device).module
            for name in _GENERATION_FIELDS:
                setattr(draft.generation_config, name, setup.assistant.get(name))
            how["assistant_model"] = draft
        if torch.get_num_threads() != setup.threads:
            torch.set_num_threads(setup.threads)
        streamer = _FirstToken()
        begin = time.perf_counter()
        token_ids = target.generate(
            request.prompt_token_ids, request.max_tokens, request.ignore_eos, streamer=streamer,
            **how,
        )  # fmt: skip
        seconds = time.perf_counter() - begin
        return PeerAnswer(token_ids, seconds, streamer.at and streamer.at - begin)


def main() -> None:
    """Answer until standard input ends. Nothing but answers goes to standard output."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    peers = _Peers()
    for line in sys.stdin:
        said = json.loads(line)
        try:
            request = PeerRequest(**{**said, "setup": PeerSetup(**said["setup"])})
            document: dict[str, Any] = asdict(peers.answer(request))
        except (FlyspecError, OSError, ValueError, RuntimeError) as error:
            document = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(document), file=answers, flush=True)


if __name__ == "__main__":
    main()
