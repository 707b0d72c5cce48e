"""The comparison made by `flyspec bench`: collect systems and prompts, measure, report."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flyspec.cli.stack import Stack
from flyspec.client import AsyncClient
from flyspec.concurrency import check_reached, interrupted
from flyspec.errors import ConfigError
from flyspec.progress import error_console, working
from flyspec_lab.bench import tables
from flyspec_lab.bench.llama_cpp import LlamaServer
from flyspec_lab.bench.machine import this_machine
from flyspec_lab.bench.modes import Answer, Item, Mode, Noise, OtherMode, Sample
from flyspec_lab.bench.openai import OpenAIServer
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.peers import Calibration, PeerSetup, Transformers
from flyspec_lab.bench.prompts import Group, random_tokens
from flyspec_lab.bench.report import report, report_batches
from flyspec_lab.bench.speed import (
    BatchSample,
    flyspec_modes,
    hindsight,
    measure,
    measure_batches,
    read_items,
)
from flyspec_lab.commands.bench.common import models_of
from flyspec_lab.report import Report

_CALIBRATED_ON = 3  # prompts, each from another group


async def compare(
    o: SpeedOptions,
    groups: list[Group],
    model: str | None,
    client: AsyncClient,
    stack: Stack | None,
    rehearsed: bool = False,
) -> Report:
    """Measure everything. `model` is where the files of a running stack's target are, if known.

    If `rehearsed`, every prompt runs once in every mode before it counts, and what is cached then
    stays so.
    """
    console = error_console()
    target = (await client.list_models()).target
    source = str(stack.options.model) if stack else model or target.name
    if o.random_prompts:
        groups = [*groups, random_tokens(o.random_prompts, source, o.problem_seed)]
    modes: list[Mode] = [*flyspec_modes(client, o)]
    # Others may be using a running stack, so its caches are left alone.
    slots = stack.options.max_sessions if stack and not rehearsed else 0
    noise = Noise(client, target.vocab_size, slots)
    draft = (stack.options.draft_model or "") if stack else ""
    transformers: Transformers | None = None
    llama: LlamaServer | None = None
    if o.peers and 1 in o.batch:
        transformers = Transformers(o.peers, source, draft, target.device)
    if o.llama_server is not None:
        llama = LlamaServer(o.llama_server, source, draft, max(o.batch))
    names = [*(mode.name for mode in modes), *o.peers, *(name for name, _ in o.against)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two modes are named {twice!r}; name servers with NAME=URL")
    samples: list[Sample] = []
    batch_samples: list[BatchSample] = []
    async with AsyncExitStack() as resources:
        with working("decoding all prompts plainly, for their lengths"):
            items = await read_items(client, groups, o)
        found, calibrations = await _others(
            o, resources, items, transformers, llama, lambda text: console.print(text)
        )
        modes += found
        others = [mode.name for mode in found]
        prompts = sum(map(len, items))
        console.print(f"{prompts} prompts in {len(modes)} modes on {target.name}", markup=False)
        if 1 in o.batch:
            with working("warming up all modes"):
                for mode in modes:
                    await mode.run(items[0][0])
            samples = await measure(modes, items, o.repeats + rehearsed, noise)
            if rehearsed:
                order = {mode.name: place for place, mode in enumerate(modes)}
                counted = [replace(s, repeat=s.repeat - 1) for s in samples if s.repeat]
                samples = sorted(counted, key=lambda s: (s.repeat, order[s.mode]))
                check_reached(samples)
        batches = [batch for batch in o.batch if batch > 1]
        if batches and not interrupted():
            batch_samples = await measure_batches(modes, items, batches, o.repeats, noise)
    others = others if samples else []
    reports = report(samples, others, hindsight(o))
    batch_reports = report_batches(batch_samples)
    where = {g.name: [Path(p.where).name for p in g.prompts] for g in groups}
    shown: list[Any] = []
    for group, of in reports.items():
        shown += tables.speed_tables(group, of, others)
        shown.append(f"slowest: {tables.worst_prompts(of, where[group], others)}\n")
    if batch_reports:
        shown.append(tables.batch_table(batch_reports))
    if reports:
        shown += [tables.SPEED_NOTES, tables.ROUNDS_NOTES]
    shown += [f"{c.peer}: {c.setup} was fastest" for c in calibrations]
    document = {
        **vars(o),
        **models_of(target, stack),
        "kind": "speed",
        "command": ["flyspec", *sys.argv[1:]],
        "machine": this_machine(),
        "prompts_cached": not slots,
        "others": others,
        "calibrations": [{**vars(c), "setup": str(c.setup)} for c in calibrations],
        "prompts": where,
        "groups": reports,
        "batches": batch_reports,
    }
    return Report(document, shown, {"samples": samples, "batch_samples": batch_samples})


async def _others(
    o: SpeedOptions,
    resources: AsyncExitStack,
    items: Sequence[Sequence[Item]],
    transformers: Transformers | None,
    llama: LlamaServer | None,
    say: Callable[[str], None],
) -> tuple[list[OtherMode], list[Calibration[Any]]]:
    """Return the modes of other software, each at its fastest, and how that was found."""
    tried_on = [of[0].prompt_token_ids for of in items[:_CALIBRATED_ON]]
    modes: list[OtherMode] = []
    calibrations: list[Calibration[Any]] = []
    if transformers is not None:
        for peer in o.peers:
            with working(f"trying setups of {peer}"):
                found = await transformers.calibrate(peer, tried_on, o.max_tokens, o.ignore_eos)
            say(f"{peer}: {found.setup} is fastest")
            calibrations.append(found)
            modes.append(OtherMode(peer, partial(_by_peer, o, transformers, found.setup), False))
    servers = []
    if llama is not None:
        for tried in await llama.calibrate(tried_on, say):
            calibrations.append(tried)
            serving = llama.serving(tried.peer, tried.setup, tried_on[0])
            servers.append(await resources.enter_async_context(serving))
    for name, url in o.against:
        server = OpenAIServer(name, url)
        await server.connect(tried_on[0])
        servers.append(server)
    modes += [OtherMode(server.name, partial(_by_server, server), True) for server in servers]
    return modes, calibrations


async def _by_peer(o: SpeedOptions, peers: Transformers, setup: PeerSetup, i: Item) -> Answer:
    return await peers.generate(setup, i.prompt_token_ids, o.max_tokens, o.ignore_eos)


async def _by_server(server: OpenAIServer, i: Item) -> Answer:
    return await server.complete(i.prompt_token_ids, i.plain_tokens)
