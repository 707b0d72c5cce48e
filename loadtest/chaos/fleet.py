"""Replicas of the services on this machine, each behind a proxy, and one orchestrator."""

from __future__ import annotations

import asyncio
import shutil
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, Self

from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from flyspec.bundled import DRAFT, DRAFT_BYTES, TARGET
from flyspec.cli.stack_options import LOOPBACK
from flyspec.errors import ConfigError
from flyspec.flags import Dtype, Flag, LogLevel
from loadtest.chaos.restartable import Restartable
from loadtest.proxy import Proxy
from loadtest.sampler import resident_mib
from orchestrator.upstreams.draft import GrpcDraftUpstream
from orchestrator.upstreams.verify import GrpcVerifyUpstream

FOREIGN_DRAFTER = "bytes"
Role = Literal["target", "drafter"]


# fmt: off
@dataclass(frozen=True)
class FleetOptions:
    """What to start."""

    no_foreign: Annotated[bool, Flag("Leave out the drafter with another tokenizer.")] = False
    dtype: Annotated[Dtype, Flag("Data type of the targets' weights.")] = "auto"
    log_level: Annotated[LogLevel, Flag(
        "Minimum level of the services' logs, on standard error.",
    )] = "error"
    draft_timeout_s: float = 2.0
    # fmt: on


@dataclass(eq=False)
class Member:
    """A service to disturb: its process, and the proxy between it and the orchestrator.

    `other_model` is a checkpoint that it should not have. `lock` is held while a fault is
    injected; `healed_s` is when the last one was over, in the run's time.
    """

    role: Role
    process: Restartable
    proxy: Proxy
    other_model: Path
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    healed_s: float = 0.0

    @property
    def name(self) -> str:
        return self.process.name

    async def num_sessions(self) -> int:
        """Return how many sessions it says it has. Raises `UnavailableError`."""
        upstream = (GrpcVerifyUpstream if self.role == "target" else GrpcDraftUpstream)(
            f"{LOOPBACK}:{self.process.port}", 5.0
        )
        try:
            return (await upstream.describe()).sessions.active
        finally:
            await upstream.close()


class ProxiedFleet:
    """`async with ProxiedFleet(options) as fleet: ...`."""

    orchestrator: Restartable

    def __init__(self, options: FleetOptions) -> None:
        for model in (TARGET, DRAFT, DRAFT_BYTES):
            if not (model / "model.safetensors").is_file():
                raise ConfigError(f"{model} has no weights; run `make models`")
        self.options = options
        self._exits = AsyncExitStack()
        folder = self._exits.enter_context(TemporaryDirectory(prefix="flyspec-chaos-"))
        self._other_model = Path(folder) / "target"
        self.targets = [self._member("target", f"target {i}", TARGET) for i in (1, 2)]
        self.drafters = [self._member("drafter", f"drafter {i}", DRAFT) for i in (1, 2)]
        self.foreign = [self._member("drafter", "drafter of bytes", DRAFT_BYTES)]
        if options.no_foreign:
            self.foreign = []

    @property
    def members(self) -> list[Member]:
        """All services but the orchestrator."""
        return [*self.targets, *self.drafters, *self.foreign]

    @property
    def address(self) -> str:
        return f"{LOOPBACK}:{self.orchestrator.port}"

    @property
    def admin_address(self) -> str:
        return f"{LOOPBACK}:{self.orchestrator.service.facts['admin_port']}"

    @property
    def orchestrator_mib(self) -> float:
        return resident_mib(self.orchestrator.service.pid) or 0.0

    async def __aenter__(self) -> Self:
        async with self._exits as exits:
            save_other_weights(TARGET, self._other_model)
            for member in self.members:
                await member.proxy.start()
                exits.push_async_callback(member.proxy.close)
                await self._start(member.process)
            for member in self.members:
                await member.process.service.ready()
            self.orchestrator = self._make_orchestrator()
            await self._start(self.orchestrator)
            await self.orchestrator.service.ready()
            self._exits = exits.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._exits.aclose()

    async def _start(self, process: Restartable) -> None:
        await process.spawn()
        self._exits.push_async_callback(process.end)

    def _member(self, role: Role, name: str, model: Path) -> Member:
        target = role == "target"
        flags = ["--model", str(model), "--dtype", self.options.dtype if target else "auto",
                 "--threads", "1", "--max-sessions", "64", "--step-timeout-s", "5",
                 *self._common()]  # fmt: skip
        process = Restartable(name, "verify_service" if target else "draft_service", flags, _log)
        return Member(role, process, Proxy(LOOPBACK, process.port), self._other_model)

    def _make_orchestrator(self) -> Restartable:
        flags = [
            "--admin-port", "0",
            "--verify-address", ",".join(m.proxy.address for m in self.targets),
            "--draft-address", ",".join(m.proxy.address for m in self.drafters),
            "--drafters", " ".join(f"{FOREIGN_DRAFTER}={m.proxy.address}" for m in self.foreign),
            "--draft-timeout-s", str(self.options.draft_timeout_s),
            "--round-timeout-s", "10", "--reopen-timeout-s", "110",
            "--probe-interval-s", "1", "--probe-timeout-s", "1.5",
            *self._common(),
        ]  # fmt: skip
        return Restartable("orchestrator", "orchestrator", flags, _log)

    def _common(self) -> list[str]:
        return ["--log-level", self.options.log_level, "--drain-grace-s", "4"]


def save_other_weights(source: Path, folder: Path) -> None:
    """Save a checkpoint of the same shape that gives other texts: its last two layers swapped."""
    shutil.copytree(source, folder)
    weights = load_file(folder / SAFE_WEIGHTS_NAME)
    layers = [name.split(".")[2] for name in weights if name.startswith("model.layers.")]
    last = max(map(int, layers))
    for name in list(weights):
        if name.startswith(prefix := f"model.layers.{last}."):
            before = f"model.layers.{last - 1}." + name.removeprefix(prefix)
            weights[name], weights[before] = weights[before], weights[name]
    save_file(weights, folder / SAFE_WEIGHTS_NAME, {"format": "pt"})


def _log(line: str) -> None:
    """Print a line of a service's log without disturbing a report."""
    print(f"  {line}", file=sys.stderr)
