"""Tensor parallelism: the ranks that hold a model together, and how rank 0 leads them.

Each rank is a process with a share of the weights (`loading`) and the KV heads that belong to it
(`slots`). Rank 0 serves; before each forward it sends its step plan (`step_plan`) and the others
run the same forward. Plans go over gloo on every device: a rank that waits for one keeps no GPU
busy, however long it waits. Who starts the ranks, and notices that one is gone, is the service's
business.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from flyspec.engine.model import Rows, Step
from flyspec.engine.runner import ModelRunner
from flyspec.engine.step_plan import FIRST_MESSAGE, HEADER, Kind, Plan, decode, encode
from flyspec.errors import ConfigError

# Loading differs between ranks by minutes, and a pause between requests may last for days. That a
# rank is gone is noticed by other means, within seconds; these only have to be long.
JOIN_TIMEOUT = timedelta(minutes=30)
COLLECTIVE_TIMEOUT = timedelta(hours=6)
IDLE_S = 60.0
"""Seconds without a step after which rank 0 sends an idle plan."""

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Place(NamedTuple):
    """A process's place among the ranks; `host` and `port` are where they meet.

    `local_rank` counts the ranks of this host, of which there are `local_size`.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int

    def environment(self) -> dict[str, str]:
        """The variables that say this to another process, as torchrun sets them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def place_from_environment(environ: Mapping[str, str]) -> Place | None:
    """The place that torchrun's variables give this process; None without them, or if it is alone.

    LOCAL_RANK is 0 and LOCAL_WORLD_SIZE 1 if not given: one rank a host. Raises `ConfigError`.
    """
    if not environ.get("RANK") or environ.get("WORLD_SIZE", "") in ("", "1"):
        return None
    missing = [name for name in _ENVIRONMENT if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set, {' and '.join(missing)} not; "
            f"set {', '.join(_ENVIRONMENT)} to join other ranks, or none of them"
        )
    numbers = {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", *numbers):
        try:
            numbers[name] = int(environ.get(name, numbers.get(name, "")))
        except ValueError:
            raise ConfigError(f"{name}={environ[name]}: must be a whole number") from None
    rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
    if not 0 <= rank < size:
        raise ConfigError(f"RANK={rank}: must be between 0 and WORLD_SIZE - 1 = {size - 1}")
    return Place(rank, size, numbers["LOCAL_RANK"], numbers["LOCAL_WORLD_SIZE"],
                 environ["MASTER_ADDR"], numbers["MASTER_PORT"])  # fmt: skip


class RankGroup:
    """The ranks of one model, joined. Rank 0 sends plans, the others receive them in order.

    `sent` and `finished` count plans: those sent by rank 0, those carried out by this rank.
    """

    def __init__(self, place: Place, device: torch.device, store: Any, control: Any) -> None:
        self.place, self.device = place, device
        self.sent = self.finished = 0
        self._store = store
        self._control = control
        self._lock = threading.Lock()

    @classmethod
    def join(
        cls, place: Place, device: torch.device, listener: socket.socket | None = None
    ) -> Self:
        """Meet the other ranks; returns when all are there.

        `listener` is a socket at the meeting place, already listening, that rank 0 takes over;
        without it rank 0 listens on all interfaces. Raises `ConfigError` if they do not come.
        """
        nccl = device.type == "cuda"
        if nccl:
            torch.cuda.set_device(device)
        # transformers binds the process to this device when it builds its mesh.
        os.environ["LOCAL_RANK"] = str(place.local_rank)
        try:
            store = _meet(place, listener)
            dist.init_process_group(
                "nccl" if nccl else "gloo",
                store=PrefixStore("flyspec", store),
                rank=place.rank,
                world_size=place.size,
                timeout=COLLECTIVE_TIMEOUT,
                device_id=device if nccl else None,
            )
            control = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
            dist.barrier(control)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"rank {place.rank} of {place.size} could not meet the others at "
                f"{place.host}:{place.port}: {' '.join(str(error).split()):.200}"
            ) from error
        return cls(place, device, store, control)

    def connect(self) -> Any:
        """A connection of its own to the store that all ranks share, for one more thread."""
        return PrefixStore("watch", _client(self.place))

    def wait_for_all(self) -> None:
        """Return when every rank has called this."""
        dist.barrier(self._control)

    def least(self, number: int) -> int:
        """The least of the numbers with which all ranks call this."""
        common = torch.tensor([number])
        dist.all_reduce(common, dist.ReduceOp.MIN, self._control)
        return int(common)

    def all_equal(self, number: int | None) -> bool:
        """Whether all ranks that call this with a number call it with the same one."""
        most = torch.iinfo(torch.int64).max
        least = self.least(most if number is None else number)
        return self.least(most if number is None else -number) in (-least, most)

    def send(self, plan: Tensor) -> None:
        """Rank 0: tell the others what to do next. Thread-safe."""
        with self._lock:
            self.sent += 1
            first = torch.zeros(FIRST_MESSAGE, dtype=torch.int64)
            head = plan[:FIRST_MESSAGE]
            first[: len(head)] = head
            dist.broadcast(first, 0, self._control)
            if len(plan) > FIRST_MESSAGE:
                dist.broadcast(plan[FIRST_MESSAGE:].contiguous(), 0, self._control)

    def receive(self) -> Plan:
        """The other ranks: wait for rank 0's next plan."""
        first = torch.empty(FIRST_MESSAGE, dtype=torch.int64)
        dist.broadcast(first, 0, self._control)
        length = int(first[0])
        if length < HEADER:
            raise ValueError(f"a step plan of {length} numbers")
        if length <= FIRST_MESSAGE:
            return decode(first)
        rest = torch.empty(length - FIRST_MESSAGE, dtype=torch.int64)
        dist.broadcast(rest, 0, self._control)
        return decode(torch.cat([first, rest]))

    def send_idle(self) -> None:
        """Rank 0: show that the way to the others is open."""
        self.send(encode((), (), Kind.IDLE))

    def stop(self) -> None:
        """Rank 0: let the others end, and wait until they know."""
        self.send(encode((), (), Kind.STOP))
        self.wait_for_all()

    def follow(self, runner: ModelRunner, on_stop: Callable[[], None]) -> None:
        """The other ranks: carry out plans until rank 0 stops; `on_stop` before it may end."""
        while True:
            plan = self.receive()
            if plan.kind is Kind.STOP:
                on_stop()
                self.wait_for_all()
                return
            if plan.kind is Kind.STEP:
                runner.cache.pending_copies[:] = plan.copies
                runner.forward(plan.steps)
                runner.synchronize()
            self.finished += 1

    def leave(self) -> None:
        """Give up connections. Only after `stop`: what is still under way would block."""
        dist.destroy_process_group()


class LeadRunner(ModelRunner):
    """Rank 0's runner: once it leads, the other ranks run every forward with it."""

    _group: RankGroup | None = None

    def lead(self, group: RankGroup, on_failure: Callable[[Exception], NoReturn]) -> None:
        """From now on tell `group` every step. Call after `warm_up`, which all ranks run.

        Ranks are out of step after one that failed: `on_failure` is told why, and must not return.
        """
        self._group, self._on_failure = group, on_failure

    def forward(self, steps: Sequence[Step]) -> list[Rows]:
        """As `ModelRunner.forward`, on all ranks; hidden rows are whole on each, so only here."""
        if self._group is None:
            return super().forward(steps)
        try:
            self._group.send(encode(self.cache.pending_copies, steps))
            return super().forward(steps)
        except Exception as error:
            self._on_failure(error)


def rank_device(device: str, place: Place) -> torch.device:
    """The device of this rank: `--device` cpu, cuda, or auto. Raises `ConfigError`."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"--device {device}: with --tensor-parallel-size each rank takes a device of its own; "
            "use cpu, cuda or auto, and CUDA_VISIBLE_DEVICES to choose GPUs"
        )
    visible = torch.cuda.device_count()
    if place.local_size > visible or place.local_rank >= visible:
        raise ConfigError(
            f"--tensor-parallel-size {place.size}: {place.local_size} ranks on this host need as "
            f"many GPUs, torch sees {visible}; use a smaller size, or --device cpu"
        )
    return torch.device("cuda", place.local_rank)


def weight_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Bytes of a model's weights: those that this rank holds, and all ranks' without repeats."""
    own = total = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own += local.numel() * local.element_size()
        total += parameter.numel() * parameter.element_size()
    return own, total


def _meet(place: Place, listener: socket.socket | None) -> TCPStore:
    """The store through which the ranks find each other; rank 0 keeps it, unless torchrun does."""
    kept_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if place.rank > 0 or kept_by_torchrun:
        return _client(place)
    return TCPStore(
        place.host,
        place.port,
        is_master=True,
        timeout=JOIN_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _client(place: Place) -> TCPStore:
    return TCPStore(
        place.host, place.port, is_master=False, timeout=JOIN_TIMEOUT, wait_for_workers=False
    )
