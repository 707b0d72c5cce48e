"""Tensor parallelism: the ranks that hold a model together, and how rank 0 leads them.

Each rank is a process with a share of the weights (`loading`) and the corresponding KV heads. Rank
0 serves; before each forward it sends its step plan and the others run the same forward. Plans go
over gloo on every device: a rank waiting for one keeps no GPU busy, however long it waits. The
service starts the ranks and notices when one is gone.

A plan is one int64 vector, so that a step costs one broadcast and no pickling:

    length, kind, copies, changes, steps,  source, target, length  of each copy,
                                           slot, index, block  of each change of the block table,
                                           slot, start, tokens, logits  of each step,
                                           the token ids of all steps

`length` counts the whole vector. Hidden layers are not sent, since rank 0's rows are whole, and
trees are not run.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from itertools import chain
from typing import Any, NamedTuple, NoReturn, Self

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

from flyspec.engine import stepwise
from flyspec.engine.cache_table import BlockChange, Copy, Moves
from flyspec.engine.model import NEVER, Draw, Interrupt, Rows, Step
from flyspec.engine.runner import ModelRunner
from flyspec.errors import ConfigError
from flyspec.values.tokens import Drafted

# Ranks may finish loading minutes apart, and a pause between requests may last for days. A lost
# rank is noticed by other means, within seconds; these only have to be long.
JOIN_TIMEOUT = timedelta(minutes=30)
COLLECTIVE_TIMEOUT = timedelta(hours=6)
IDLE_S = 60.0
"""Seconds without a step after which rank 0 sends an idle plan."""

_ENVIRONMENT = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

HEADER = 5
FIRST_MESSAGE = 512
"""Numbers in the first message; the rest of a longer plan follows in a second one."""


class Kind(IntEnum):
    """Tasks of the other ranks."""

    STEP = 0
    IDLE = 1
    """Nothing: shows that rank 0 is alive and keeps idle connections from being dropped."""
    STOP = 2


class Plan(NamedTuple):
    """A decoded plan; moves and steps are empty unless `kind` is STEP."""

    kind: Kind
    moves: Moves
    steps: list[Step]


def encode(moves: Moves, steps: Sequence[Step], kind: Kind = Kind.STEP) -> Tensor:
    """Return the plan as an int64 vector on the CPU."""
    shapes = [(s.slot, s.start, len(s.token_ids), s.num_logits) for s in steps]
    numbers = [0, int(kind), len(moves.copies), len(moves.changes), len(steps)]
    numbers.extend(chain.from_iterable(c for c in moves.copies if isinstance(c, Copy)))
    numbers.extend(chain.from_iterable(moves.changes))
    numbers.extend(chain.from_iterable(shapes))
    numbers.extend(chain.from_iterable(step.token_ids for step in steps))
    numbers[0] = len(numbers)
    return torch.tensor(numbers, dtype=torch.int64)


def decode(plan: Tensor) -> Plan:
    """Decode a plan. Numbers beyond its own length are ignored.

    Raises `ValueError` for a vector that is not a plan: the ranks are out of step.
    """
    numbers: list[int] = plan.tolist()
    length, kind, num_copies, num_changes, num_steps = numbers[:HEADER]
    copied = HEADER + 3 * num_copies
    first = copied + 3 * num_changes
    at = first + 4 * num_steps
    if not at <= length <= len(numbers):
        raise ValueError(f"invalid step plan: length {length}, received {len(numbers)} numbers")
    moves = Moves(
        [Copy(*numbers[i : i + 3]) for i in range(HEADER, copied, 3)],
        [BlockChange(*numbers[i : i + 3]) for i in range(copied, first, 3)],
    )
    steps = []
    for i in range(first, at, 4):
        slot, start, num_tokens, num_logits = numbers[i : i + 4]
        steps.append(Step(slot, start, numbers[at : at + num_tokens], num_logits))
        at += num_tokens
    if at != length:
        raise ValueError(f"invalid step plan: length {length}, contents describe {at} numbers")
    return Plan(Kind(kind), moves, steps)


class Place(NamedTuple):
    """A process's place among the ranks, which meet at `host` and `port`.

    `local_rank` is its number among the `local_size` ranks on this host.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: str
    port: int

    def environment(self) -> dict[str, str]:
        """Return the environment variables for this place, as torchrun sets them."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.host,
            "MASTER_PORT": str(self.port),
        }


def place_from_environment(environ: Mapping[str, str]) -> Place | None:
    """Return the place in torchrun's variables; None without them, or for a single process.

    LOCAL_RANK defaults to 0 and LOCAL_WORLD_SIZE to 1: one rank per host. Raises `ConfigError`.
    """
    if not environ.get("RANK") or environ.get("WORLD_SIZE", "") in ("", "1"):
        return None
    missing = [name for name in _ENVIRONMENT if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"RANK and WORLD_SIZE are set without {' and '.join(missing)}; "
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

    `sent` counts the plans that rank 0 sent, `finished` those that this rank carried out.
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
        """Meet the other ranks; returns when all have joined.

        `listener` is a socket already listening at the meeting place, which rank 0 takes over;
        without it rank 0 listens on all interfaces. Raises `ConfigError` if they do not join.
        """
        nccl = device.type == "cuda"
        if nccl:
            torch.cuda.set_device(device)
        # transformers binds the process to the device of this number when it builds its mesh.
        own = place.local_rank if device.index is None else device.index
        os.environ["LOCAL_RANK"] = str(own)
        try:
            store = _meet(place, listener)
            dist.init_process_group(
                # Named like this, torch's device mesh takes the group as it is; for "gloo" it would
                # make one with NCCL wherever there is a GPU.
                "nccl" if nccl else "cpu:gloo",
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
                f"rank {place.rank} of {place.size} could not join the others at "
                f"{place.host}:{place.port}: {' '.join(str(error).split()):.200}"
            ) from error
        return cls(place, device, store, control)

    def connect(self) -> Any:
        """Return a separate connection to the store that all ranks share, for another thread."""
        return PrefixStore("watch", _client(self.place))

    def wait_for_all(self) -> None:
        """Wait until every rank has called this."""
        dist.barrier(self._control)

    def least(self, number: int) -> int:
        """Return the minimum of the numbers with which all ranks call this."""
        common = torch.tensor([number])
        dist.all_reduce(common, dist.ReduceOp.MIN, self._control)
        return int(common)

    def all_equal(self, number: int | None) -> bool:
        """True if all ranks that call this with a number call it with the same one."""
        most = torch.iinfo(torch.int64).max
        least = self.least(most if number is None else number)
        return self.least(most if number is None else -number) in (-least, most)

    def send(self, plan: Tensor) -> None:
        """Send the others the next plan (rank 0). Thread-safe."""
        with self._lock:
            self.sent += 1
            first = torch.zeros(FIRST_MESSAGE, dtype=torch.int64)
            head = plan[:FIRST_MESSAGE]
            first[: len(head)] = head
            dist.broadcast(first, 0, self._control)
            if len(plan) > FIRST_MESSAGE:
                dist.broadcast(plan[FIRST_MESSAGE:].contiguous(), 0, self._control)

    def receive(self) -> Plan:
        """Wait for rank 0's next plan (other ranks)."""
        first = torch.empty(FIRST_MESSAGE, dtype=torch.int64)
        dist.broadcast(first, 0, self._control)
        length = int(first[0])
        if length < HEADER:
            raise ValueError(f"invalid step plan: length {length}")
        if length <= FIRST_MESSAGE:
            return decode(first)
        rest = torch.empty(length - FIRST_MESSAGE, dtype=torch.int64)
        dist.broadcast(rest, 0, self._control)
        return decode(torch.cat([first, rest]))

    def send_idle(self) -> None:
        self.send(encode(Moves(), (), Kind.IDLE))

    def stop(self) -> None:
        """Stop the others, and wait until they know (rank 0)."""
        self.send(encode(Moves(), (), Kind.STOP))
        self.wait_for_all()

    def follow(self, runner: ModelRunner, on_stop: Callable[[], None]) -> None:
        """Carry out plans until rank 0 stops, which waits for `on_stop` (other ranks)."""
        while True:
            plan = self.receive()
            if plan.kind is Kind.STOP:
                on_stop()
                self.wait_for_all()
                return
            if plan.kind is Kind.STEP:
                runner.cache.apply_changes(plan.moves.changes)
                runner.run(plan.steps, plan.moves)
                runner.synchronize()
            self.finished += 1

    def leave(self) -> None:
        """Close the connections. Only after `stop`: pending operations would block."""
        dist.destroy_process_group()


class LeadRunner(ModelRunner):
    """Rank 0's runner: once it leads, the other ranks run every forward with it."""

    _group: RankGroup | None = None

    @property
    def tree_refusal(self) -> str:
        return "the ranks of a tensor-parallel group are not sent trees"

    def lead(self, group: RankGroup, on_failure: Callable[[Exception], NoReturn]) -> None:
        """Send `group` every step from now on. Call after `warm_up`, which all ranks run.

        A failed step leaves the ranks out of step: `on_failure` gets the error and must not return.
        """
        self._group, self._on_failure = group, on_failure

    def run(self, steps: Sequence[Step], moves: Moves) -> list[Rows]:
        """Like `ModelRunner.run`, on all ranks; hidden rows are whole here and not sent."""
        if self._group is None:
            return super().run(steps, moves)
        try:
            self._group.send(encode(moves, steps))
            return super().run(steps, moves)
        except Exception as error:
            self._on_failure(error)

    def draw(self, draws: Sequence[Draw], interrupt: Interrupt = NEVER) -> list[Drafted]:
        """Like `Model.draw`, a forward per token: rank 0 alone draws."""
        if self._group is None:
            return super().draw(draws, interrupt)
        return stepwise.draw(self.forward, draws, interrupt)


def rank_device(device: str, place: Place) -> torch.device:
    """Return the device of this rank for `--device` cpu, cuda or auto. Raises `ConfigError`."""
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if device not in ("auto", "cuda"):
        raise ConfigError(
            f"--device {device}: with --tensor-parallel-size each rank uses its own device; "
            "use cpu, cuda or auto, and CUDA_VISIBLE_DEVICES to choose GPUs"
        )
    visible = torch.cuda.device_count()
    if place.local_size > visible or place.local_rank >= visible:
        raise ConfigError(
            f"--tensor-parallel-size {place.size}: {place.local_size} ranks on this host need as "
            f"many GPUs, but torch found {visible}; use a smaller size, or --device cpu"
        )
    return torch.device("cuda", place.local_rank)


def weight_bytes(model: torch.nn.Module) -> tuple[int, int]:
    """Return the bytes of a model's weights: on this rank, and on all ranks without repeats."""
    own = total = 0
    for parameter in model.parameters():
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        own += local.numel() * local.element_size()
        total += parameter.numel() * parameter.element_size()
    return own, total


def _meet(place: Place, listener: socket.socket | None) -> TCPStore:
    """The store through which ranks find each other; rank 0 hosts it, unless torchrun does."""
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
