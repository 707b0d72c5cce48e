"""transformers' ways to generate, on the same machine and each at its fastest.

    transformers   greedy decoding
    assisted       with the same draft model
    prompt lookup  with n-grams of the text instead of a draft model
    ensemble       assisted, and lossy: accepts a draft if the mixture of both models chooses it

Before anything is measured, a few prompts are tried in every setup: data types and threads, then
the other choices of the method. Time is measured around `generate` alone, while nothing else runs
in this process.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from flyspec.errors import ConfigError, FlyspecError
from flyspec.process import available_cores
from flyspec_lab.bench.modes import Answer

Setup = Mapping[str, Any]
"""Options of other software by its own names."""
DTYPES = ("bfloat16", "float32")
THREADS = tuple(sorted({1, available_cores()}, reverse=True))
_TOKENS = 64
_SLOWER = 1.3
"""Times the fastest setup's time after which another one is not tried any further."""


def described(setup: Setup) -> str:
    return ", ".join(f"{name} {value}" for name, value in setup.items())


@dataclass(frozen=True)
class Calibration:
    """The setup chosen for a peer, and the seconds of each one tried, until it was too slow."""

    peer: str
    setup: Setup
    tried: dict[str, float]


_ASSISTANT_FIELDS = ("num_assistant_tokens", "num_assistant_tokens_schedule",
                     "assistant_confidence_threshold")  # fmt: skip
"""Fields that transformers takes from the assistant's configuration rather than from the call."""
# Ks, then the defaults and the former schedule, both of which stop drafting early.
_ASSISTED = [
    dict(zip(_ASSISTANT_FIELDS, values, strict=True))
    for values in (
        (4, "constant", 0.0), (8, "constant", 0.0), (15, "constant", 0.0), (20, "constant", 0.4),
        (5, "heuristic_transient", 0.4),
    )
]  # fmt: skip
_CHOICES: Mapping[str, Sequence[Setup]] = {
    "transformers": [{}],
    "assisted": _ASSISTED,
    "prompt lookup": [{"prompt_lookup_num_tokens": k} for k in (4, 8, 15)],
    "ensemble": [{**choice, "assistant_ensemble_weight": 0.5} for choice in _ASSISTED],
}


class Transformers:
    """Models of directories `model` and `draft`, as transformers runs them on a device.

    Those of one data type are in memory at a time. An empty `draft` is none, which only peers that
    need it refuse.
    """

    def __init__(self, model: str, draft: str, device: str, ignore_eos: bool = False) -> None:
        self._model, self._draft, self._device = model, draft, device
        self._ignore_eos = ignore_eos
        self._loaded: dict[tuple[str, str], Any] = {}
        self._thread = ThreadPoolExecutor(1, "transformers")  # torch has threads for each

    def close(self) -> None:
        """Forget the models."""
        self._loaded.clear()
        self._thread.shutdown()

    async def calibrate(self, peer: str, prompts: Sequence[Sequence[int]]) -> Calibration:
        """Find the setup of a peer that continues these prompts fastest.

        The first choice is tried in all data types and threads, then all choices in the fastest of
        these. The time is the sum of each prompt's better of two runs, after an uncounted one.
        Raises `ConfigError` if the peer needs a model that is not here.
        """
        choices = _CHOICES[peer]
        if any(name in choices[0] for name in _ASSISTANT_FIELDS) and not self._draft:
            raise ConfigError(
                f"transformers needs the draft model's directory for {peer}, which a running stack "
                "does not tell; remove --address, or choose other --peers"
            )
        frames = [{"dtype": d, "threads": t, **choices[0]} for d in DTYPES for t in THREADS]
        best, tried = dict[str, Any](), dict[str, float]()
        for stage in (frames, choices):
            setups = [{**best, **choice} for choice in stage]
            for setup in setups:
                if described(setup) in tried:
                    continue
                least, seconds = min(tried.values(), default=math.inf), 0.0
                await self.generate(setup, prompts[0], _TOKENS)
                for prompt in prompts:
                    if seconds <= _SLOWER * least:
                        done = [await self.generate(setup, prompt, _TOKENS) for _ in range(2)]
                        seconds += min(answer.seconds for answer in done)
                tried[described(setup)] = seconds
            best = min([*setups, best], key=lambda setup: tried.get(described(setup), math.inf))
        return Calibration(peer, best, tried)

    async def generate(self, setup: Setup, token_ids: Sequence[int], max_tokens: int) -> Answer:
        """Continue a prompt greedily. Raises `FlyspecError` with transformers' error."""
        try:
            return await asyncio.get_running_loop().run_in_executor(
                self._thread, self._answer, setup, token_ids, max_tokens
            )
        except (OSError, ValueError, RuntimeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise FlyspecError(f"transformers, {described(setup)}: {what}") from None

    def _answer(self, setup: Setup, token_ids: Sequence[int], max_tokens: int) -> Answer:
        import torch

        how = dict(setup)
        dtype, threads = how.pop("dtype"), how.pop("threads")
        target = self._reference(self._model, dtype)
        assistant = {name: how.pop(name) for name in _ASSISTANT_FIELDS if name in how}
        if assistant:
            how["assistant_model"] = self._reference(self._draft, dtype).module
            for name, value in assistant.items():
                setattr(how["assistant_model"].generation_config, name, value)
        torch.set_num_threads(threads)
        streamer = _FirstToken()
        begin = time.perf_counter()
        answer = target.generate(token_ids, max_tokens, self._ignore_eos, streamer=streamer, **how)
        seconds = time.perf_counter() - begin
        return Answer(len(answer), seconds, streamer.at and streamer.at - begin, answer)

    def _reference(self, directory: str, dtype: str) -> Any:
        from flyspec_lab.bench.reference import Reference

        if any(other != dtype for _, other in self._loaded):
            self._loaded.clear()
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
