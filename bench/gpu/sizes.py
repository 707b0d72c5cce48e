"""`python -m bench.gpu.sizes`: the memory tables of docs/serve-your-own-models.md.

From the services' own planner, which calculates the same before it loads a model.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bench.documents import write_between
from bench.gpu.example import Served
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.engine.memory import readable
from flyspec.flags import Flag
from flyspec.tables import markdown

MAX_MODEL_LEN = 8_192
GPUS = {
    "24 GB (L4)": 23_034 << 20,
    "80 GB (H100)": 81_559 << 20,
    "141 GB (H200)": 143_771 << 20,
}
"""Memory that the driver reports, in bytes."""
TARGETS = (
    ("llama-8b", 1, "24 GB (L4)"),
    ("llama-8b", 1, "80 GB (H100)"),
    ("llama-70b", 2, "80 GB (H100)"),
    ("llama-70b", 4, "80 GB (H100)"),
    ("llama-70b", 8, "80 GB (H100)"),
    ("llama-70b", 2, "141 GB (H200)"),
    ("llama-405b", 8, "80 GB (H100)"),
    ("llama-405b", 16, "80 GB (H100)"),
    ("llama-405b", 8, "141 GB (H200)"),
)
DRAFTS = (
    ("llama-1b", 1, "24 GB (L4)"),
    ("llama-8b", 1, "24 GB (L4)"),
    ("llama-8b", 1, "80 GB (H100)"),
)
HEAD = ["model", "GPUs", "weights", "activations", "left for the cache", "a token", "tokens",
        f"sessions of {MAX_MODEL_LEN:,}"]  # fmt: skip


def _row(shape: str, ranks: int, gpu: str, target: bool) -> list[str]:
    settings: ModelServerSettings = DraftSettings(model=shape, max_model_len=MAX_MODEL_LEN)
    if target:
        settings = VerifySettings(
            model=shape, max_model_len=MAX_MODEL_LEN, tensor_parallel_size=ranks
        )
    one = Served("", shape, ranks, settings, GPUS[gpu])
    fit = one.fit
    name = shape.removeprefix("llama-").upper()
    row = [name, f"{ranks} x {gpu}", readable(fit.taken["weights"]),
           readable(fit.taken["activations"])]  # fmt: skip
    if one.cache_tokens < MAX_MODEL_LEN:
        return [*row, f"does not fit in {readable(fit.limit)}", "", "", "0"]
    tokens = one.cache_tokens
    return [*row, readable(fit.left), readable(one.bytes_per_token), f"{tokens:,}",
            f"{tokens // MAX_MODEL_LEN:,}"]  # fmt: skip


def tables() -> dict[str, str]:
    """The tables by the name of their marks."""
    return {
        "targets": markdown(HEAD, [_row(*what, target=True) for what in TARGETS]),
        "drafts": markdown(HEAD, [_row(*what, target=False) for what in DRAFTS]),
    }


@with_flags
def sizes(
    document: Annotated[Path, Flag("Document to update.")] = Path("docs/serve-your-own-models.md"),
) -> None:
    """Write what fits on which GPUs into a document, between <!-- NAME --> and <!-- /NAME -->."""
    document.write_text(write_between(document.read_text(), tables()))


if __name__ == "__main__":
    run(single(sizes))
