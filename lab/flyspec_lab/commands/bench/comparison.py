"""The comparison made by `flyspec bench`: collect modes and prompts, measure, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

from flyspec.cli.stack import Stack
from flyspec.client import AsyncClient
from flyspec.concurrency import interrupted
from flyspec.errors import ConfigError
from flyspec.flags import Dtype
from flyspec.progress import error_console, working
from flyspec_lab.bench import tables
from flyspec_lab.bench.conditions import PLAIN
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.modes import FlyspecMode, Item, Mode, Noise, OtherMode, Sample
from flyspec_lab.bench.openai import OpenAIServer, StreamedCompletion
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.peers import Calibration, PeerAnswer, PeerProcess, PeerSetup, peer_process
from flyspec_lab.bench.planning import measured_modes, step_costs_of
from flyspec_lab.bench.prompts import Group, random_tokens
from flyspec_lab.bench.report import report, report_batches
from flyspec_lab.bench.speed import (
    BatchSample,
    flyspec_modes,
    hindsight,
    measure,
    measure_batches,
    plain_options,
    read_items,
)
from flyspec_lab.bench.transport import round_trips_ns
from flyspec_lab.commands.bench.common import models_of
from flyspec_lab.planning.measured import KEY
from flyspec_lab.report import Report

_CALIBRATED_ON = 3  # prompts, each from another group


async def compare(
    o: SpeedOptions,
    groups: list[Group],
    model: str | None,
    client: AsyncClient,
    stack: Stack | None,
) -> Report:
    """Measure everything. `model` is where the files of a running stack's target are, if known."""
    console = error_console()
    target = (await client.list_models()).target
    source = str(stack.options.model) if stack else model or target.name
    if o.random_prompts:
        groups = [*groups, random_tokens(o.random_prompts, source, o.problem_seed)]
    modes: list[Mode] = [*flyspec_modes(client, o)]
    names = [*(mode.name for mode in modes), *o.others]
    if twice := next((name for name in o.others if names.count(name) > 1), None):
        raise ConfigError(f"two modes are named {twice!r}; name servers with NAME=URL")
    # Others may be using a running stack, so its caches are left alone.
    noise = Noise(client, target.vocab_size, stack.options.max_sessions if stack else 0)
    calibrations: list[Calibration] = []
    samples: list[Sample] = []
    batch_samples: list[BatchSample] = []
    async with AsyncExitStack() as resources:
        process = None
        if o.peers and 1 in o.batch:
            draft = (stack.options.draft_model or "") if stack else ""
            process = await resources.enter_async_context(
                peer_process(o.peers, source, draft, target.device)
            )
        if o.compare_dtypes and stack is not None:
            with working("starting a stack with the other data type"):
                modes.append(await _other_dtype(resources, stack, target.dtype, o))
        with working("decoding all prompts plainly, for their lengths"):
            items = await read_items(client, groups, o)
        if process is not None:
            tried_on = [of[0].prompt_token_ids for of in items[:_CALIBRATED_ON]]
            for peer in o.peers:
                with working(f"trying setups of {peer}"):
                    found = await process.calibrate(peer, tried_on, o.max_tokens, o.ignore_eos)
                console.print(f"{peer}: {found.setup} is fastest", markup=False)
                calibrations.append(found)
                modes.append(OtherMode(peer, partial(_by_peer, o, process, found.setup), False))
        modes += await _servers(o, items, source)
        prompts = sum(map(len, items))
        console.print(f"{prompts} prompts in {len(modes)} modes on {target.name}", markup=False)
        if 1 in o.batch:
            with working("warming up all modes"):
                for mode in modes:
                    await mode.run(items[0][0])
            samples = await measure(modes, items, o.repeats, noise)
        batches = [batch for batch in o.batch if batch > 1]
        if batches and not interrupted():
            batch_samples = await measure_batches(modes, items, batches, o.repeats, noise)
    reports = report(samples, o.others, hindsight(o))
    batch_reports = report_batches(batch_samples)
    step_costs = await step_costs_of(stack.options.verify_address) if stack else ()
    bare_ms = await round_trips_ns() / 1e6
    where = {g.name: [Path(p.where).name for p in g.prompts] for g in groups}
    shown: list[Any] = []
    for group in where if reports else ():
        of = reports[group]
        shown += tables.speed_tables(group, of, o.others)
        shown.append(f"slowest: {tables.worst_prompts(of, where[group], o.others)}\n")
    if batch_reports:
        shown.append(tables.batch_table(batch_reports))
    if reports:
        shown += [tables.SPEED_NOTES, tables.ROUNDS_NOTES]
    shown += [f"{found.peer}: {found.setup} was fastest" for found in calibrations]
    shown.append(
        "Every round includes two bare gRPC round trips with a model's work between them: "
        f"{bare_ms:.2f} ms here."
    )
    document = {
        **vars(o),
        **models_of(target, stack),
        "kind": "speed",
        "command": ["flyspec", *sys.argv[1:]],
        "machine": this_machine(),
        "prompts_cached": stack is None,
        "others": o.others if 1 in o.batch else [],
        "calibrations": [{**vars(c), "setup": str(c.setup)} for c in calibrations],
        "grpc_round_trips_p50_ms": bare_ms,
        "prompts": where,
        "groups": reports,
        "batches": batch_reports,
        KEY: measured_modes(modes, samples, step_costs, stack is not None),
    }
    return Report(document, shown, {"samples": samples, "batch_samples": batch_samples})


async def _other_dtype(
    resources: AsyncExitStack, stack: Stack, dtype: str, o: SpeedOptions
) -> FlyspecMode:
    """Start a second stack for plain decoding in the other data type."""
    other: Dtype = "float32" if dtype != "float32" else "bfloat16"
    second = Stack(stack.options.on_free_ports(dtype=other, draft_model=""))
    await resources.enter_async_context(second)
    client = await resources.enter_async_context(AsyncClient(second.address, max_retries=0))
    return FlyspecMode(f"{PLAIN}, {other}", client, plain_options(o))


async def _by_peer(o: SpeedOptions, process: PeerProcess, setup: PeerSetup, i: Item) -> PeerAnswer:
    return await process.generate(setup, i.prompt_token_ids, o.max_tokens, o.ignore_eos)


async def _by_server(server: OpenAIServer, i: Item) -> StreamedCompletion:
    return await server.complete(i.prompt_token_ids, i.plain_tokens)


async def _servers(
    o: SpeedOptions, items: Sequence[Sequence[Item]], target: str
) -> list[OtherMode]:
    """Return the modes of other servers, after checking that each one answers."""
    modes = []
    for name, url in o.against:
        server = OpenAIServer(name, url, _decoder(target))
        await server.connect(items[0][0].prompt_token_ids)
        modes.append(OtherMode(name, partial(_by_server, server), True))
    return modes


def _decoder(target: str) -> Callable[[Sequence[int]], str] | None:
    """Return a decoder of the target's tokens, if its tokenizer is on this machine."""
    from tokenizers import Tokenizer

    path = Path(target).expanduser() / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = Tokenizer.from_file(str(path))
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False))
