"""The comparison made by `flyspec bench`: collect systems and prompts, measure, report."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial
from importlib import metadata
from itertools import chain, product
from pathlib import Path
from typing import Any

from flyspec.cli.stack import Stack
from flyspec.client import AsyncClient
from flyspec.concurrency import interrupted
from flyspec.errors import ConfigError
from flyspec.progress import error_console, working
from flyspec_lab.bench.modes import Mode, Noise, OtherMode, Sample
from flyspec_lab.bench.openai import serving
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.peers import Calibration, Transformers, described
from flyspec_lab.bench.prompts import Group, random_tokens
from flyspec_lab.bench.report import (
    NOTES,
    batch_table,
    report,
    report_batches,
    speed_tables,
)
from flyspec_lab.bench.speed import (
    BatchSample,
    flyspec_modes,
    hindsight,
    measure,
    measure_batches,
    read_items,
)
from flyspec_lab.interrupting import check_reached
from flyspec_lab.report import Report

_CALIBRATED_ON = 3  # prompts, each from another group
_PACKAGES = ("flyspec", "torch", "transformers", "numpy", "grpcio")


async def compare(
    o: SpeedOptions,
    groups: Sequence[Group],
    facts: Mapping[str, Any],
    client: AsyncClient,
    stack: Stack | None,
) -> Report:
    """Measure everything. `facts` go into the document besides; `model` is where the files of a
    running stack's target are, if known.

    Other software comes first, each alone with plain decoding. On a pair that is made, every prompt
    runs once in every mode before it counts, and stays cached.
    """
    console = error_console()
    target = (await client.list_models()).target
    source = str(stack.options.model) if stack else facts["model"] or target.name
    draft = (stack.options.draft_model or "") if stack else ""
    if o.random_prompts:
        groups = [*groups, random_tokens(o.random_prompts, source, o.problem_seed)]
    ours = flyspec_modes(client, o)
    # Others may be using a running stack, so its caches are left alone.
    slots = stack.options.max_sessions if stack and not o.makes_pair else 0
    noise = Noise(client, target.vocab_size, slots)
    names = [*(mode.name for mode in ours), *o.peers, *(name for name, _ in o.against)]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ConfigError(f"two modes are named {twice!r}; name servers with NAME=URL")
    samples: list[Sample] = []
    batch_samples: list[BatchSample] = []
    calibrations: list[Calibration] = []
    batches = [batch for batch in o.batch if batch > 1]
    with working("decoding all prompts plainly, for their lengths"):
        items = await read_items(ours[0], groups, o.chat)
    prompt_ids = [of[0].prompt_token_ids for of in items[:_CALIBRATED_ON]]
    prompts = sum(map(len, items))
    console.print(f"{prompts} prompts in {len(names)} modes on {target.name}", markup=False)

    async def take_turn(number: int, modes: Sequence[Mode]) -> None:
        """Measure some modes, in repeats that are theirs alone."""
        if 1 in o.batch:
            with working(f"warming up {', '.join(mode.name for mode in modes)}"):
                for mode, item in product(modes, chain(*items) if o.makes_pair else items[0][:1]):
                    await mode.run(item)
            found = await measure(modes, items, o.repeats, noise)
            samples.extend(replace(s, repeat=s.repeat + number * o.repeats) for s in found)
        if batches and not interrupted():
            several = await measure_batches(modes, items, batches, o.repeats, noise)
            batch_samples.extend(replace(s, repeat=s.repeat + number * o.repeats) for s in several)

    transformers = Transformers(source, draft, target.device, o.ignore_eos)
    number = 0
    async with aclosing(_others(o, prompt_ids, transformers)) as turns:
        async for other, calibration in turns:
            calibrations += [calibration] if calibration else []
            number += 1
            await take_turn(number, [ours[0], other])
            if interrupted():
                break
    if not interrupted():
        await take_turn(0, ours)
    check_reached([*samples, *batch_samples])
    measured = {sample.mode for sample in samples}
    others = [name for name in (*o.peers, *(name for name, _ in o.against)) if name in measured]
    fixed = hindsight(o) if ours[-1].name in measured else {}
    reports, batch_reports = report(samples, others, fixed), report_batches(batch_samples)
    where = {g.name: [Path(p.where).name for p in g.prompts] for g in groups}
    shown: list[Any] = []
    for group, of in reports.items():
        shown += speed_tables(group, of, others)
    if batch_reports:
        shown.append(batch_table(batch_reports))
    if reports:
        shown += NOTES
    shown += [f"{c.peer}: {described(c.setup)} was fastest" for c in calibrations]
    document = {
        **vars(o),
        "target": target,
        "stack": stack.options if stack else None,
        **facts,
        "command": ["flyspec", *sys.argv[1:]],
        "machine": _this_machine(),
        "prompts_cached": not slots,
        "others": others,
        "calibrations": calibrations,
        "prompts": where,
        "groups": reports,
        "batches": batch_reports,
    }
    return Report(document, shown, {"samples": samples, "batch_samples": batch_samples})


async def _others(
    o: SpeedOptions, prompts: Sequence[Sequence[int]], transformers: Transformers
) -> AsyncGenerator[tuple[OtherMode, Calibration | None], None]:
    """Yield the modes of other software, with transformers' setups; each is there for its turn."""
    for name, where in o.against:
        error_console().print(f"connecting to {name}", markup=False)
        async with serving(f"--against {name}", where) as server:
            await server.connect(prompts[0])
            yield OtherMode(name, server.complete, concurrent=True), None
    with closing(transformers):
        for peer in o.peers if 1 in o.batch else ():
            with working(f"trying setups of {peer}"):
                found = await transformers.calibrate(peer, prompts)
            complete = partial(transformers.generate, found.setup)
            yield OtherMode(peer, complete, concurrent=False), found


def _this_machine() -> dict[str, Any]:
    """Return facts that results depend on: processor, accelerator, versions."""
    import torch

    path = Path("/proc/cpuinfo")
    known = re.search(r"model name\s*:\s*(.+)", path.read_text() if path.is_file() else "")
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "processor": known[1] if known else platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "versions": versions,
    }
