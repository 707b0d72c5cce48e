"""Replicas of the services as processes of this machine, each behind a proxy, one orchestrator."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal, Self

from safetensors.torch import load_file, save_file
from transformers.utils import SAFE_WEIGHTS_NAME

from bench.proxy import Proxy
from bench.restartable import Restartable
from flyspec.cli.stack import DEMO_MODELS
from flyspec.errors import ConfigError
from orchestrator.upstreams.draft import GrpcDraftUpstream
from orchestrator.upstreams.verify import GrpcVerifyUpstream

TARGET, DRAFT, FOREIGN = (DEMO_MODELS / name for name in ("target", "draft", "draft-bytes"))
FOREIGN_DRAFTER = "bytes"
Role = Literal["target", "drafter"]


@dataclass(frozen=True)
class FleetOptions:
    """What to start. `foreign` adds a drafter with another tokenizer, by the name `bytes`.

    Services have `max_sessions` each; times are in seconds. `dtype` is that of the targets.
    """

    targets: int = 2
    drafters: int = 2
    foreign: bool = True
    dtype: str = "auto"
    max_sessions: int = 64
    draft_timeout_s: float = 2.0
    round_timeout_s: float = 10.0
    reopen_timeout_s: float = 110.0
    step_timeout_s: float = 5.0
    probe_interval_s: float = 1.0
    probe_timeout_s: float = 1.5
    drain_grace_s: float = 4.0
    log_level: str = "error"


class Member:
    """A service that can be hurt: its process, and the proxy between it and the orchestrator.

    `other_model` is a checkpoint that it should not have.

    `lock` is held by who hurts it, `healed_s` is when that was last over, in the run's time.
    """

    def __init__(self, role: Role, process: Restartable, other_model: Path | None = None) -> None:
        self.role, self.process, self.other_model = role, process, other_model
        self.lock = asyncio.Lock()
        self.healed_s = 0.0
        self._proxy: Proxy | None = None

    @property
    def name(self) -> str:
        """What reports call it."""
        return self.process.name

    @property
    def proxy(self) -> Proxy:
        """What the orchestrator connects to; there once the service was ready."""
        assert self._proxy is not None, f"{self.name} was never ready"
        return self._proxy

    async def start(self) -> None:
        """Wait until the service, which runs already, serves, and put the proxy before it."""
        await self.process.ready()
        self._proxy = Proxy("127.0.0.1", self.process.port)
        await self._proxy.start()

    async def num_sessions(self) -> int:
        """Sessions open on it, as it says itself. Raises `UnavailableError`."""
        address = f"127.0.0.1:{self.process.port}"
        upstream: GrpcVerifyUpstream | GrpcDraftUpstream
        if self.role == "target":
            upstream = GrpcVerifyUpstream(address, 5.0)
        else:
            upstream = GrpcDraftUpstream(address, 5.0)
        try:
            return (await upstream.describe()).sessions.active
        finally:
            await upstream.close()

    async def stop(self) -> None:
        """End it for good."""
        if self._proxy is not None:
            await self._proxy.close()
        await self.process.end()


class ProxiedFleet:
    """`async with ProxiedFleet(options) as fleet: ...`."""

    def __init__(self, options: FleetOptions) -> None:
        for model in (TARGET, DRAFT, *((FOREIGN,) if options.foreign else ())):
            if not (model / "model.safetensors").is_file():
                raise ConfigError(f"{model} has no weights; run `make models`")
        self.options = options
        o = options
        self._folder = TemporaryDirectory(prefix="flyspec-chaos-")
        other = Path(self._folder.name) / "target"
        self.targets = [
            Member(
                "target",
                self._process(f"target {i}", "verify_service", str(TARGET), o.dtype),
                other,
            )
            for i in range(1, o.targets + 1)
        ]
        self.drafters = [
            Member("drafter", self._process(f"drafter {i}", "draft_service", str(DRAFT)))
            for i in range(1, o.drafters + 1)
        ]
        self.foreign = [
            Member("drafter", self._process("drafter of bytes", "draft_service", str(FOREIGN)))
            for _ in range(o.foreign)
        ]
        self._orchestrator: Restartable | None = None

    @property
    def members(self) -> list[Member]:
        """All services but the orchestrator."""
        return [*self.targets, *self.drafters, *self.foreign]

    @property
    def orchestrator(self) -> Restartable:
        """The orchestrator, once started."""
        assert self._orchestrator is not None, "the fleet was never started"
        return self._orchestrator

    @property
    def address(self) -> str:
        """Where clients generate."""
        return f"127.0.0.1:{self.orchestrator.port}"

    @property
    def admin_address(self) -> str:
        """Where the operator asks."""
        return f"127.0.0.1:{self.orchestrator.service.facts['admin_port']}"

    async def __aenter__(self) -> Self:
        try:
            assert self.targets[0].other_model is not None
            save_other_weights(TARGET, self.targets[0].other_model)
            for member in self.members:
                await member.process.spawn()
            for member in self.members:
                await member.start()
            self._orchestrator = self._make_orchestrator()
            await self._orchestrator.spawn()
            await self._orchestrator.ready()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._orchestrator is not None:
            await self._orchestrator.end(signal.SIGKILL)
        for member in self.members:
            await member.stop()
        self._folder.cleanup()

    def _process(self, name: str, module: str, model: str, dtype: str = "auto") -> Restartable:
        o = self.options
        flags = ["--model", model, "--dtype", dtype, "--threads", "1",
                 "--max-sessions", str(o.max_sessions),
                 "--step-timeout-s", str(o.step_timeout_s), *self._common()]  # fmt: skip
        return Restartable(name, module, flags, 1, _log)

    def _make_orchestrator(self) -> Restartable:
        o = self.options
        flags = [
            "--admin-port", "0",
            "--verify-address", ",".join(m.proxy.address for m in self.targets),
            "--draft-address", ",".join(m.proxy.address for m in self.drafters),
            "--drafters", " ".join(f"{FOREIGN_DRAFTER}={m.proxy.address}" for m in self.foreign),
            "--draft-timeout-s", str(o.draft_timeout_s),
            "--round-timeout-s", str(o.round_timeout_s),
            "--reopen-timeout-s", str(o.reopen_timeout_s),
            "--probe-interval-s", str(o.probe_interval_s),
            "--probe-timeout-s", str(o.probe_timeout_s),
            *self._common(),
        ]  # fmt: skip
        return Restartable("orchestrator", "orchestrator", flags, 1, _log)

    def _common(self) -> list[str]:
        o = self.options
        return ["--log-level", o.log_level, "--drain-grace-s", str(o.drain_grace_s)]


def save_other_weights(source: Path, folder: Path) -> None:
    """A checkpoint of the same model in shape, whose texts are others: its last layers' order."""
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
    """What the services say, where it does not disturb a report."""
    print(f"  {line}", file=sys.stderr)
