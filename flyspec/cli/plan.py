"""`flyspec plan`: what a pair of models needs and gains on given devices, by calculation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from flyspec.cli.json_output import print_json
from flyspec.cli.options import with_flags
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.planning.devices import DEVICES
from flyspec.planning.speed import ACCEPTANCE, CONTEXT

if TYPE_CHECKING:
    from flyspec.planning.speed import Placed, SpeedPlan

_EXAMPLE = "flyspec plan --model TARGET --draft-model DRAFT --device h100x4 --acceptance 0.8"


# fmt: off
@with_flags
def plan(
    model: Annotated[str, Flag("Target: a directory with config.json, or a hub id.")] = "",
    draft_model: Annotated[str, Flag("Draft model, likewise.")] = "",
    device: Annotated[str, Flag(
        f"Devices of the target: {', '.join(DEVICES)}; xN for N of them in tensor parallel.",
        metavar="NAME[xN]",
    )] = "",
    draft_device: Annotated[str, Flag(
        "Device of the draft model.", metavar="NAME", default="one of the target's",
    )] = "",
    acceptance: Annotated[float, Flag("Probability that a draft is accepted.", min=0)] = ACCEPTANCE,
    context_tokens: Annotated[int, Flag("Tokens of a session.", min=1)] = CONTEXT,
    bandwidth: Annotated[float, Flag(
        "Memory bandwidth of a device in GB/s.", min=0, default="the device's; needed for cpu",
    )] = 0.0,
    tflops: Annotated[float, Flag(
        "Dense bfloat16 TFLOP/s of a device.", min=0, default="the device's; cpu: not limiting",
    )] = 0.0,
    json: Annotated[bool, Flag("Print one JSON document.")] = False,
    names: Annotated[list[str] | None, typer.Argument(hidden=True)] = None,
) -> None:
    # fmt: on
    """Say what a draft model gains on given devices, and the memory of both models.

    A calculation from the models' shapes; no weights are read and nothing is measured. Speeds are
    upper bounds: messages, judging and anything else but the models take no time.
    """
    if names or not (model and draft_model and device):
        raise ConfigError(f"plan needs two models and a device, by flags: {_EXAMPLE}")
    if acceptance > 1:
        raise ConfigError(f"--acceptance {acceptance:g}: must be between 0 and 1")
    from flyspec.planning.devices import read_group
    from flyspec.planning.shapes import shape_of
    from flyspec.planning.speed import Placed, SpeedPlan

    of_target = read_group(device, bandwidth, tflops)
    of_draft = of_target._replace(size=1)
    if draft_device:
        of_draft = read_group(draft_device, 0 if of_target.name != draft_device else bandwidth)
    target, draft = Placed(shape_of(model), of_target), Placed(shape_of(draft_model), of_draft)
    found = SpeedPlan(target, draft, acceptance, context_tokens)
    if json:
        print_json(_document(found))
    else:
        _show(found)


def _document(found: SpeedPlan) -> dict[str, Any]:
    def of(model: Placed, step_s: float) -> dict[str, Any]:
        return {
            "device": model.on.name,
            "devices": model.on.size,
            **model.shape._asdict(),
            "session_bytes": model.shape.kv_bytes * found.context,
            "step_s": step_s,
        }

    return {
        "acceptance": found.acceptance,
        "context_tokens": found.context,
        "target": of(found.target, found.plain_s),
        "draft": of(found.draft, found.draft_s),
        "plain_tokens_per_s": 1 / found.plain_s,
        "rounds": [r._asdict() | {"tokens_per_s": r.tokens / r.seconds} for r in found.rounds],
        "best_k": found.best.k if found.pays else 0,
        "verdict": found.verdict,
    }


def _show(found: SpeedPlan) -> None:
    from flyspec.engine.cache_size import readable
    from flyspec.tables import make_table, rate, result_console

    models = [(found.target, found.plain_s), (found.draft, found.draft_s)]
    rows = {
        "devices": [f"{m.on.size} x {m.on.name}" for m, _ in models],
        "weights": [readable(m.shape.weight_bytes) for m, _ in models],
        f"KV cache, {found.context:,} tokens": [
            readable(m.shape.kv_bytes * found.context) for m, _ in models
        ],
        "step of one token": [f"{1e3 * s:.2f} ms" for _, s in models],
    }
    console = result_console()
    console.print(make_table(["", "target", "draft"], ([n, *cells] for n, cells in rows.items())))
    plain = "0", "1.00", rate(1 / found.plain_s), "1.00"
    drafted = [
        (str(r.k), f"{r.tokens:.2f}", rate(r.tokens / r.seconds), f"{r.gain:.2f}")
        for r in found.rounds
    ]
    columns = ["K", "tokens/round", "tokens/s", "x plain"]
    console.print(make_table(columns, [plain, *drafted], "one session, at most"))
    for line in (*_misfits(found), found.verdict):
        console.print(line, markup=False)


def _misfits(found: SpeedPlan) -> list[str]:
    """Return what does not fit into the memory of a device."""
    from flyspec.engine.cache_size import readable

    (shape, on), (draft, draft_on) = found.target, found.draft
    needed = {on: shape.weight_bytes // on.size, draft_on: draft.weight_bytes}
    if draft_on.name == on.name:
        needed = {on: shape.weight_bytes // on.size + draft.weight_bytes}
    return [
        f"does not fit: weights take {readable(size)} of a {group.name}'s "
        f"{readable(int(group.device.memory_bytes))}"
        for group, size in needed.items()
        if 0 < group.device.memory_bytes < size
    ]
