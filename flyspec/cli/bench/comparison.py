"""The comparison made by `flyspec bench`: collect modes and prompts, measure, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flyspec.bench.conditions import PLAIN
from flyspec.bench.machine import this_machine
from flyspec.bench.modes import AgainstMode, FlyspecMode, Item, Mode, Noise, PeerMode
from flyspec.bench.openai import OpenAIServer
from flyspec.bench.peers import Calibration, PeerProcess, peer_process
from flyspec.bench.prompts import Group, random_tokens
from flyspec.bench.report import BatchReport, ModeReport, report, report_batches, to_document
from flyspec.bench.speed import (
    SpeedOptions,
    flyspec_modes,
    hindsight,
    measure,
    measure_batches,
    plain_options,
    read_items,
)
from flyspec.bench.tables import (
    ROUNDS_NOTES,
    SPEED_NOTES,
    batch_table,
    speed_tables,
    worst_prompts,
)
from flyspec.bench.transport import round_trips_ns
from flyspec.cli.progress import progress_bar
from flyspec.cli.runtime import error_console
from flyspec.cli.stack import Stack
from flyspec.client import Client
from flyspec.errors import ConfigError
from flyspec.flags import Dtype

if TYPE_CHECKING:
    from rich.console import Console

_CALIBRATED_ON = 3  # prompts, each from another group
_LEAST_SESSIONS = 4


@dataclass
class Comparison:
    """What to compare on which prompts; `run` fills in the results, `show` prints them.

    `model` is where the target's files of a running stack are; if empty, its name is used.
    """

    options: SpeedOptions
    groups: list[Group]
    model: str = ""
    random_prompts: int = 0
    seed: int = 0
    peers: Sequence[str] = ()
    against: Sequence[tuple[str, str]] = ()
    batches: Sequence[int] = (1,)
    compare_dtypes: bool = False
    reports: dict[str, list[ModeReport]] = field(default_factory=dict)
    batch_reports: list[BatchReport] = field(default_factory=list)
    bare_ms: float = 0.0
    calibrations: list[Calibration] = field(default_factory=list)

    @property
    def max_sessions(self) -> int:
        """The limit for a stack started here: low, so that noise soon fills its caches."""
        largest = max(self.batches)
        return max(_LEAST_SESSIONS, largest + largest // 4)

    @property
    def others(self) -> list[str]:
        """Names of the modes other than flyspec's."""
        return [*self.peers, *(name for name, _ in self.against)]

    async def run(self, client: Client, stack: Stack | None) -> dict[str, Any]:
        """Measure everything. Return the report as JSON, samples included."""
        o = self.options
        console = error_console()
        target = (await client.list_models()).target
        source = str(stack.options.model) if stack else self.model or target.name
        if self.random_prompts:
            self.groups.append(random_tokens(self.random_prompts, source, self.seed))
        names = [mode.name for mode in flyspec_modes(client, o)]
        for name in self.others:
            if (names := [*names, name]).count(name) > 1:
                raise ConfigError(f"two modes are named {name!r}; name servers with NAME=URL")
        # Others may use a running stack, so its caches are left alone.
        noise = Noise(client, target.vocab_size, stack.options.max_sessions if stack else 0)
        async with AsyncExitStack() as resources:
            process = await self._peer_process(resources, source, target.device, stack)
            modes: list[Mode] = [*flyspec_modes(client, o)]
            if self.compare_dtypes and stack is not None:
                console.print("starting a stack with the other data type", markup=False)
                modes.append(await self._other_dtype(resources, stack, target.dtype))
            items = await read_items(client, self.groups, o)
            if process is not None:
                modes += await self._peers(process, items)
            modes += await self._servers(items, source)
            samples, batch_samples = [], []
            in_turn = 1 in self.batches
            at_once = [batch for batch in self.batches if batch > 1]
            prompts = sum(map(len, items))
            total = o.repeats * (
                in_turn * prompts * len(modes)
                + len(at_once) * len(items) * sum(mode.concurrent for mode in modes)
            )
            console.print(f"{prompts} prompts in {len(modes)} modes on {target.name}", markup=False)
            with progress_bar(console) as progress:
                bar = progress.add_task("measuring", total=total)

                def advance() -> None:
                    progress.advance(bar)

                if in_turn:
                    samples = await measure(modes, self.groups, items, o.repeats, noise, advance)
                if at_once:
                    batch_samples = await measure_batches(
                        modes, items, at_once, o.repeats, noise, advance
                    )
        self.reports = report(samples, self.others, hindsight(o))
        self.batch_reports = report_batches(batch_samples)
        self.bare_ms = await round_trips_ns() / 1e6
        facts = {
            "kind": "speed",
            "command": ["flyspec", *sys.argv[1:]],
            "machine": this_machine(),
            "target": target.name,
            "dtype": target.dtype,
            "device": target.device,
            "threads": stack.options.threads if stack else None,
            "draft_threads": stack.options.draft_threads if stack else None,
            "draft_model": stack.options.draft_model if stack else None,
            "drafters": list(o.drafters),
            "num_speculative_tokens": list(o.num_speculative_tokens),
            "max_tokens": o.max_tokens,
            "ignore_eos": o.ignore_eos,
            "repeats": o.repeats,
            "prompts_cached": stack is None,
            "others": self.others if 1 in self.batches else [],
            "calibrations": [{**asdict(c), "setup": str(c.setup)} for c in self.calibrations],
            "grpc_round_trips_p50_ms": self.bare_ms,
            "prompts": {g.name: [Path(p.where).name for p in g.prompts] for g in self.groups},
        }
        return {
            **to_document(self.reports, **facts),
            "batches": [asdict(r) for r in self.batch_reports],
            "samples": [asdict(s) for s in samples],
            "batch_samples": [asdict(s) for s in batch_samples],
        }

    def show(self, console: Console) -> None:
        """Print tables and the notes below them."""
        for group in self.groups if self.reports else ():
            reports = self.reports[group.name]
            for table in speed_tables(group.name, reports, self.others):
                console.print(table)
            where = [Path(p.where).name for p in group.prompts]
            slowest = worst_prompts(reports, where, self.others)
            console.print(f"slowest: {slowest}\n", style="dim", markup=False)
        if self.batch_reports:
            console.print(batch_table(self.batch_reports))
        if self.reports:
            console.print(SPEED_NOTES, style="dim")
            console.print(ROUNDS_NOTES, style="dim")
        for found in self.calibrations:
            console.print(f"{found.peer}: {found.setup} was fastest", style="dim", markup=False)
        console.print(
            "Every round includes two bare gRPC round trips with a model's work between them: "
            f"{self.bare_ms:.2f} ms here.",
            style="dim",
        )

    async def _other_dtype(
        self, resources: AsyncExitStack, stack: Stack, dtype: str
    ) -> FlyspecMode:
        """Start a second stack for plain decoding in the other data type."""
        other: Dtype = "float32" if dtype != "float32" else "bfloat16"
        options = stack.options.on_free_ports(dtype=other, draft_model="")
        second = Stack(options)
        await resources.enter_async_context(second)
        client = await resources.enter_async_context(Client(second.address))
        return FlyspecMode(f"{PLAIN}, {other}", client, plain_options(self.options))

    async def _peer_process(
        self, resources: AsyncExitStack, target: str, device: str, stack: Stack | None
    ) -> PeerProcess | None:
        """Start the process that runs transformers, if one is needed."""
        if not self.peers or 1 not in self.batches:
            return None
        draft = (stack.options.draft_model or "") if stack else ""
        return await resources.enter_async_context(peer_process(self.peers, target, draft, device))

    async def _peers(self, process: PeerProcess, items: Sequence[Sequence[Item]]) -> list[Mode]:
        """Return transformers' modes, each in the fastest setup on a few of the prompts."""
        o = self.options
        tried_on = [of[0].prompt_token_ids for of in items[:_CALIBRATED_ON]]
        modes: list[Mode] = []
        for peer in self.peers:
            found = await process.calibrate(peer, tried_on, o.max_tokens, o.ignore_eos)
            error_console().print(f"{peer}: {found.setup} is fastest", markup=False)
            self.calibrations.append(found)
            modes.append(PeerMode(peer, process, found.setup, o.max_tokens, o.ignore_eos))
        return modes

    async def _servers(self, items: Sequence[Sequence[Item]], target: str) -> list[Mode]:
        """Return the modes of other servers, after checking that each one answers."""
        modes: list[Mode] = []
        for name, url in self.against:
            server = OpenAIServer(name, url, _decoder(target))
            await server.connect(items[0][0].prompt_token_ids)
            modes.append(AgainstMode(server))
        return modes


def _decoder(target: str) -> Callable[[Sequence[int]], str] | None:
    """Return a decoder of the target's tokens, if its tokenizer is on this machine."""
    from tokenizers import Tokenizer

    path = Path(target).expanduser() / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
