"""What others make of the same models on the same machine: transformers' ways to generate.

    transformers   greedy decoding
    assisted       with the same draft model
    prompt lookup  with n-grams of the text in place of a draft model
    ensemble       assisted, and lossy: a draft stands if the mixture of both models chooses it

Each is given its best: before anything is measured a few prompts are tried in every data type and
on one thread and on all, then with the other choices that the method has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flyspec.bench.peer_worker import PeerAnswer, PeerRequest, PeerSetup
from flyspec.errors import ConfigError, FlyspecError
from flyspec.process import available_cores

GREEDY = "transformers"
DTYPES = ("float32", "bfloat16")
ENSEMBLE_WEIGHT = 0.5
"""The target's share of the mixture that drafts are compared with."""
_NUM_TOKENS = (4, 8, 15)
_ANSWER_BYTES = 1 << 24


def _constant(k: int) -> dict[str, Any]:
    return {"num_assistant_tokens": k, "num_assistant_tokens_schedule": "constant",
            "assistant_confidence_threshold": 0.0}  # fmt: skip


# Its defaults, and the schedule that it had before: both with an early stop of the draft.
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
"""Names on the command line, and in reports."""


@dataclass(frozen=True)
class Calibration:
    """What was chosen for a peer; the seconds of each setup, until it was out of the running."""

    peer: str
    setup: PeerSetup
    tried: dict[str, float]


def parse_peers(text: str) -> tuple[str, ...]:
    """The peers that a comma list names; `all` stands for all. Raises `ConfigError`."""
    names = [piece.strip() for piece in text.split(",") if piece.strip()]
    if names == ["all"]:
        return tuple(PEERS.values())
    for name in names:
        if name not in PEERS or names.count(name) > 1:
            raise ConfigError(
                f"--peers {text!r}: {name!r} is unknown or given twice; known are "
                f"{', '.join(PEERS)}, and `all`"
            )
    return tuple(PEERS[name] for name in names)


class PeerProcess:
    """The process that runs transformers; idle while nothing is asked of it."""

    def __init__(
        self, process: asyncio.subprocess.Process, log: Any, model: str, draft: str, device: str
    ) -> None:
        self._process, self._log = process, log
        self._model, self._draft, self._device = model, draft, device
        self._threads = sorted({1, available_cores()})

    async def generate(
        self,
        setup: PeerSetup,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        ignore_eos: bool = False,
    ) -> PeerAnswer:
        """A greedy continuation. Raises `FlyspecError` with what transformers said."""
        request = PeerRequest(
            self._model, self._draft, self._device, setup, list(prompt_token_ids), max_tokens,
            ignore_eos,
        )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
            await self._process.stdin.drain()
        line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            self._log.seek(0)
            last = self._log.read().decode(errors="replace").strip().splitlines()[-5:]
            raise FlyspecError(f"the process that runs transformers ended: {' | '.join(last)}")
        answer = json.loads(line)
        if "error" in answer:
            raise FlyspecError(f"transformers, {setup}: {answer['error']}")
        return PeerAnswer(**answer)

    def kill(self) -> None:
        """End it, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def calibrate(
        self, peer: str, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = False
    ) -> Calibration:
        """The setup that continues these prompts fastest: data type and threads, then the rest."""
        first, *others = _CHOICES[peer]
        tried: dict[str, float] = {}

        async def best(setups: list[PeerSetup]) -> PeerSetup:
            for setup in setups:
                if str(setup) not in tried:
                    limit = min(tried.values(), default=math.inf)
                    tried[str(setup)] = await self._time(
                        setup, prompts, max_tokens, ignore_eos, limit
                    )
            return min(setups, key=lambda s: tried[str(s)])

        frames = [PeerSetup(d, t, **first) for d in DTYPES for t in self._threads]
        frame = await best(frames)
        setup = await best([frame, *(replace(frame, **choice) for choice in others)])
        return Calibration(peer, setup, tried)

    async def _time(
        self,
        setup: PeerSetup,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        ignore_eos: bool,
        limit: float,
    ) -> float:
        """Seconds for all prompts, each the better of two, after one that does not count.

        Given up where they are more than `limit`.
        """
        await self.generate(setup, prompts[0], max_tokens, ignore_eos)
        total = 0.0
        for prompt in prompts:
            if total > limit:
                break
            twice = [await self.generate(setup, prompt, max_tokens, ignore_eos) for _ in range(2)]
            total += min(answer.seconds for answer in twice)
        return total


@contextlib.asynccontextmanager
async def peer_process(
    peers: Sequence[str], model: str, draft: str, device: str
) -> AsyncIterator[PeerProcess]:
    """A process that runs these peers on the models in directories `model` and `draft`.

    Raises `ConfigError` if one of the models is not on this machine.
    """
    _check_directory("the target", model)
    if any("assistant" in _CHOICES[peer][0] for peer in peers):
        _check_directory("the draft model", draft)
    with tempfile.TemporaryFile() as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "flyspec.bench.peer_worker",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
            limit=_ANSWER_BYTES,
        )  # fmt: skip
        peer = PeerProcess(process, log, model, draft, device)
        try:
            yield peer
        finally:
            peer.kill()
            await process.wait()


def _check_directory(what: str, directory: str) -> None:
    if not directory:
        raise ConfigError(
            f"transformers needs {what}'s directory, which a running stack does not tell, and one "
            "without a draft model has not; leave --address out, or choose other --peers"
        )
    if not (Path(directory).expanduser() / "config.json").is_file():
        raise ConfigError(
            f"transformers needs {what}'s directory on this machine, and {directory} is none"
        )
