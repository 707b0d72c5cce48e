"""The same models on the same machine with transformers' ways to generate.

    transformers   greedy decoding
    assisted       with the same draft model
    prompt lookup  with n-grams of the text instead of a draft model
    ensemble       assisted, and lossy: accepts a draft if the mixture of both models chooses it

Each is used at its best: before anything is measured, a few prompts are tried in every data type,
on one thread and on all, then with the other choices of the method. Time is measured around
`generate` alone, while nothing else runs in this process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from flyspec.errors import ConfigError, FlyspecError
from flyspec.process import available_cores
from flyspec_lab.bench.modes import Answer

S = TypeVar("S")

DTYPES = ("float32", "bfloat16")
_GENERATION_FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule",
                      "assistant_confidence_threshold")  # fmt: skip
"""Fields that transformers takes from the assistant's configuration rather than from the call."""


@dataclass(frozen=True)
class Calibration(Generic[S]):
    """The setup chosen for a peer, and the seconds of each one tried, until it was too slow."""

    peer: str
    setup: S
    tried: dict[str, float]


async def fastest(
    peer: str, setups: Sequence[S], seconds: Callable[[S, float], Awaitable[float]]
) -> Calibration[S]:
    """Try setups in turn. `seconds` is told the least time so far and may stop behind it."""
    tried: dict[str, float] = {}
    for setup in setups:
        if str(setup) not in tried:
            tried[str(setup)] = await seconds(setup, min(tried.values(), default=math.inf))
    return Calibration(peer, min(setups, key=lambda setup: tried[str(setup)]), tried)


@dataclass(frozen=True)
class PeerSetup:
    """Options of a peer. `assistant` is the draft model's own configuration, if it drafts.

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


def _assistant(k: int, schedule: str = "constant", confidence: float = 0.0) -> dict[str, Any]:
    return dict(zip(_GENERATION_FIELDS, (k, schedule, confidence), strict=True))


# Ks, then the defaults and the former schedule, both of which stop drafting early.
_ASSISTANTS = (
    *map(_assistant, (4, 8, 15)),
    _assistant(20, confidence=0.4),
    _assistant(5, "heuristic_transient", 0.4),
)
_CHOICES: dict[str, Sequence[dict[str, Any]]] = {
    "transformers": ({},),
    "assisted": [{"assistant": a} for a in _ASSISTANTS],
    "prompt lookup": [{"arguments": {"prompt_lookup_num_tokens": k}} for k in (4, 8, 15)],
    "ensemble": [
        {"assistant": a, "arguments": {"assistant_ensemble_weight": 0.5}} for a in _ASSISTANTS
    ],
}


class Transformers:
    """Models of directories `model` and `draft`, as transformers runs them on a device.

    Raises `ConfigError` if one that the peers need is not on this machine.
    """

    def __init__(self, peers: Sequence[str], model: str, draft: str, device: str) -> None:
        needed = {"the target": model}
        if any("assistant" in _CHOICES[peer][0] for peer in peers):
            needed["the draft model"] = draft
        for what, directory in needed.items():
            if not directory:
                raise ConfigError(
                    f"transformers needs {what}'s directory, which a running stack does not tell "
                    "and one without a draft model does not have; remove --address, or choose "
                    "other --peers"
                )
            if not (Path(directory).expanduser() / "config.json").is_file():
                raise ConfigError(
                    f"transformers needs {what}'s directory on this machine; {directory} is not one"
                )
        self._model, self._draft, self._device = model, draft, device
        self._loaded: dict[tuple[str, str], Any] = {}
        self._thread = ThreadPoolExecutor(1, "transformers")  # torch has threads for each

    async def generate(
        self,
        setup: PeerSetup,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        ignore_eos: bool = False,
    ) -> Answer:
        """Continue a prompt greedily. Raises `FlyspecError` with transformers' error."""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._answer, setup, prompt_token_ids, max_tokens, ignore_eos
            )
        except (FlyspecError, OSError, ValueError, RuntimeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise FlyspecError(f"transformers, {setup}: {what}") from None

    async def calibrate(
        self, peer: str, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = False
    ) -> Calibration[PeerSetup]:
        """Find the setup that continues these prompts fastest: data type and threads, then more."""

        async def seconds(setup: PeerSetup, limit: float) -> float:
            """Add up each prompt's better of two runs, after an uncounted one, if not too slow."""
            total = 0.0
            await self.generate(setup, prompts[0], max_tokens, ignore_eos)
            for prompt in prompts:
                if total <= limit:
                    total += min([
                        (await self.generate(setup, prompt, max_tokens, ignore_eos)).seconds
                        for _ in range(2)
                    ])  # fmt: skip
            return total

        first, *others = _CHOICES[peer]
        threads = sorted({1, available_cores()})
        frames = [PeerSetup(dtype, t, **first) for dtype in DTYPES for t in threads]
        frame = await fastest(peer, frames, seconds)
        choices = [frame.setup, *(replace(frame.setup, **choice) for choice in others)]
        found = await fastest(peer, choices, seconds)
        return replace(found, tried=frame.tried | found.tried)

    def _answer(
        self, setup: PeerSetup, token_ids: Sequence[int], max_tokens: int, ignore_eos: bool
    ) -> Answer:
        import torch

        target = self._reference(self._model, setup.dtype)
        how: dict[str, Any] = dict(setup.arguments)
        if setup.assistant:
            how["assistant_model"] = self._reference(self._draft, setup.dtype).module
            for name in _GENERATION_FIELDS:
                setattr(how["assistant_model"].generation_config, name, setup.assistant.get(name))
        torch.set_num_threads(setup.threads)
        streamer = _FirstToken()
        begin = time.perf_counter()
        answer = target.generate(token_ids, max_tokens, ignore_eos, streamer=streamer, **how)
        seconds = time.perf_counter() - begin
        return Answer(len(answer), seconds, streamer.at and streamer.at - begin, answer)

    def _reference(self, directory: str, dtype: str) -> Any:
        from flyspec_lab.bench.reference import Reference

        if (directory, dtype) not in self._loaded:
            self._loaded[directory, dtype] = Reference(directory, dtype, device=self._device)
        return self._loaded[directory, dtype]


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
