"""The same models on the same machine with transformers' ways to generate.

    transformers   greedy decoding
    assisted       with the same draft model
    prompt lookup  with n-grams of the text instead of a draft model
    ensemble       assisted, and lossy: accepts a draft if the mixture of both models chooses it

Each is used at its best: before anything is measured, a few prompts are tried in every data type,
on one thread and on all, then with the other choices of the method. They run in a process of their
own, so that neither their threads nor this interpreter's lock disturb what is measured besides;
time is measured there, around `generate` alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from flyspec.errors import ConfigError, FlyspecError
from flyspec.process import available_cores

GREEDY = "transformers"
DTYPES = ("float32", "bfloat16")
ENSEMBLE_WEIGHT = 0.5
"""The target's share of the mixture with which drafts are compared."""
_NUM_TOKENS = (4, 8, 15)


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

    @property
    def tokens(self) -> int:
        return len(self.token_ids)


def _constant(k: int) -> dict[str, Any]:
    return {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0}  # fmt: skip


# The defaults, and the former schedule: both stop drafting early.
_OWN = (
    {"num_assistant_tokens": 20, "num_assistant_tokens_schedule": "constant",
     "assistant_confidence_threshold": 0.4},
    {"num_assistant_tokens": 5, "num_assistant_tokens_schedule": "heuristic_transient",
     "assistant_confidence_threshold": 0.4},
)  # fmt: skip
_ASSISTED = tuple({"assistant": a} for a in (*map(_constant, _NUM_TOKENS), *_OWN))
_MIXTURE = {"assistant_ensemble_weight": ENSEMBLE_WEIGHT}
_CHOICES: dict[str, Sequence[dict[str, Any]]] = {
    GREEDY: ({},),
    "assisted": _ASSISTED,
    "prompt lookup": [{"arguments": {"prompt_lookup_num_tokens": k}} for k in _NUM_TOKENS],
    "ensemble": [{**choice, "arguments": _MIXTURE} for choice in _ASSISTED],
}
PEERS = {"greedy": GREEDY, **{name.replace(" ", "-"): name for name in list(_CHOICES)[1:]}}
"""Names in reports, by name on the command line."""


@dataclass(frozen=True)
class Calibration:
    """The setup chosen for a peer, and the seconds of each one tried, until it was too slow."""

    peer: str
    setup: PeerSetup
    tried: dict[str, float]


def parse_peers(text: str) -> tuple[str, ...]:
    """Parse comma-separated names of peers, or `all`. Raises `ConfigError`."""
    names = [piece.strip() for piece in text.split(",") if piece.strip()]
    if names == ["all"]:
        return tuple(PEERS.values())
    for name in names:
        if name not in PEERS or names.count(name) > 1:
            raise ConfigError(
                f"--peers {text!r}: {name!r} is unknown or given twice; must be `all`, or of "
                f"{', '.join(PEERS)}"
            )
    return tuple(PEERS[name] for name in names)


class PeerProcess:
    """The process that runs transformers; idle between requests."""

    def __init__(self, pool: Executor, pid: int, log: Path, where: tuple[str, str, str]) -> None:
        self._pool, self._pid, self._log, self._where = pool, pid, log, where
        self._threads = sorted({1, available_cores()})

    async def generate(
        self,
        setup: PeerSetup,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        ignore_eos: bool = False,
    ) -> PeerAnswer:
        """Continue a prompt greedily. Raises `FlyspecError` with transformers' error."""
        work = partial(_answer, *self._where, setup, list(prompt_token_ids), max_tokens, ignore_eos)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        except BrokenExecutor:
            last = self._log.read_text(errors="replace").strip().splitlines()[-5:]
            raise FlyspecError(
                f"the process that runs transformers ended: {' | '.join(last)}"
            ) from None
        except (FlyspecError, OSError, ValueError, RuntimeError) as error:
            what = f"{type(error).__name__}: {error}"
            raise FlyspecError(f"transformers, {setup}: {what}") from None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)

    async def calibrate(
        self, peer: str, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = False
    ) -> Calibration:
        """Find the setup that continues these prompts fastest: data type and threads, then more."""
        first, *others = _CHOICES[peer]
        tried: dict[str, float] = {}

        async def try_out(setup: PeerSetup) -> None:
            """Add up each prompt's better of two runs, after an uncounted one, if not too slow."""
            limit, total = min(tried.values(), default=math.inf), 0.0
            await self.generate(setup, prompts[0], max_tokens, ignore_eos)
            for prompt in prompts:
                if total <= limit:
                    total += min([
                        (await self.generate(setup, prompt, max_tokens, ignore_eos)).seconds
                        for _ in range(2)
                    ])  # fmt: skip
            tried[str(setup)] = total

        async def best(setups: list[PeerSetup]) -> PeerSetup:
            for setup in setups:
                if str(setup) not in tried:
                    await try_out(setup)
            return min(setups, key=lambda s: tried[str(s)])

        frames = [PeerSetup(d, t, **first) for d in DTYPES for t in self._threads]
        frame = await best(frames)
        setup = await best([frame, *(replace(frame, **choice) for choice in others)])
        return Calibration(peer, setup, tried)


@contextlib.asynccontextmanager
async def peer_process(
    peers: Sequence[str], model: str, draft: str, device: str
) -> AsyncIterator[PeerProcess]:
    """Start a process that runs these peers on the models in directories `model` and `draft`.

    Raises `ConfigError` if one of the models is not on this machine.
    """
    _check_directory("the target", model)
    if any("assistant" in _CHOICES[peer][0] for peer in peers):
        _check_directory("the draft model", draft)
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(prefix="flyspec-peers-") as folder:
        log = Path(folder) / "log"
        with ProcessPoolExecutor(1, get_context("spawn"), _redirect_output, (str(log),)) as pool:
            pid = await loop.run_in_executor(pool, os.getpid)
            peer = PeerProcess(pool, pid, log, (model, draft, device))
            try:
                yield peer
            finally:
                peer.kill()


def _check_directory(what: str, directory: str) -> None:
    if not directory:
        raise ConfigError(
            f"transformers needs {what}'s directory, which a running stack does not tell and one "
            "without a draft model does not have; remove --address, or choose other --peers"
        )
    if not (Path(directory).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"transformers needs {what}'s directory on this machine; {directory} is not one"
        )


# --- in the other process ---------------------------------------------------------------------


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
    from flyspec_lab.bench.reference import Reference

    return Reference(directory, dtype, device=device)


def _redirect_output(log: str) -> None:
    """Send all output of this process to a file."""
    with open(log, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())


def _answer(
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
