"""`python -m bench.sizes`: what fits on which GPUs, in two documents.

The services' own planner (`flyspec.engine.cache_size`) calculates it, as before they load a model.
docs/measurements/gpu.md has a worked example: a target over four GPUs, and its draft model on one
of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from transformers import AutoModelForCausalLM

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.engine.cache_size import Fit, activation_bytes
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory
from flyspec.engine.heads import replicated_numbers
from flyspec.engine.memory import plan_kv_cache, readable, slot_bytes
from flyspec.flags import Flag
from flyspec.tables import markdown
from flyspec_lab.bench.shapes import config_of
from flyspec_lab.report import write_into

GPUS = {
    "24 GB (L4)": 23_034 << 20,
    "80 GB (H100)": 81_559 << 20,
    "141 GB (H200)": 143_771 << 20,
}
"""Memory that the driver reports, in bytes."""
H100 = "80 GB (H100)"
BANDWIDTH = 3.35e12
"""Bytes per second of an H100's memory, nominal."""
DTYPE = torch.bfloat16
MAX_MODEL_LEN, EXAMPLE_LEN = 8_192, 32_768
RANKS = 4
SHARES = {"target": 0.54, "draft": 0.37}
"""`--gpu-memory-utilization` of each: the draft model is on one of the target's GPUs."""
LENGTHS = (2_048, 8_192, 32_768)
CONTEXT = 4_096
ACCEPTANCE = (0.7, 0.8, 0.9)
KS = (4, 15)


@cache
def num_parameters(shape: str) -> int:
    """Return the number of weights of a model of a shape."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config_of(shape)).num_parameters())


@dataclass(frozen=True)
class Served:
    """A model of a shape as target or draft model, as its service would serve it on GPUs.

    Of each GPU it may use the `share`, or else the service's default.
    """

    role: Literal["target", "draft"]
    shape: str
    ranks: int = 1
    gpu: str = H100
    max_model_len: int = MAX_MODEL_LEN
    share: float | None = None

    @property
    def settings(self) -> ModelServerSettings:
        """The settings of the service."""
        own: dict[str, Any] = {"model": self.shape, "max_model_len": self.max_model_len}
        if self.share is not None:
            own["gpu_memory_utilization"] = self.share
        if self.role == "draft":
            return DraftSettings(**own)
        return VerifySettings(**own, tensor_parallel_size=self.ranks)

    @property
    def config(self) -> Any:
        return config_of(self.shape)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return num_parameters(self.shape) * DTYPE.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache per token, on each GPU."""
        return slot_bytes(self.config, 1, DTYPE, self.ranks)

    @property
    def fit(self) -> Fit:
        """The figures that the service compares before it loads."""
        device, config, length = torch.device("cuda", 0), self.config, self.max_model_len
        checkpoint = Checkpoint(self.shape, config, DTYPE, device, length, self.ranks, Path())
        gpu = GPUS[self.gpu]
        memory = DeviceMemory(gpu, gpu - OUTSIDE_TORCH, OUTSIDE_TORCH)
        repeated = replicated_numbers(config, self.ranks) * DTYPE.itemsize
        taken = {
            "weights": self.weight_bytes // self.ranks + repeated,
            "CUDA": memory.own,
            "activations": activation_bytes(self.settings, checkpoint),
        }
        slot = plan_kv_cache(config, length, DTYPE, 1, tensor_parallel_size=self.ranks)
        return Fit(self.shape, device, self.settings, memory, taken, slot)

    @property
    def cache_tokens(self) -> int:
        """Tokens of all sessions together that fit."""
        return self.fit.left // self.bytes_per_token

    def step_s(self) -> float:
        """Seconds of a step of one session at `CONTEXT`: reading weights and cache once."""
        return (self.weight_bytes / self.ranks + CONTEXT * self.bytes_per_token) / BANDWIDTH


EXAMPLE = (
    Served("target", "llama-70b", RANKS, H100, EXAMPLE_LEN, SHARES["target"]),
    Served("draft", "llama-8b", 1, H100, EXAMPLE_LEN, SHARES["draft"]),
)
"""The target over all GPUs, and the draft model on one of them."""
FITTING = {
    "targets": (
        Served("target", "llama-8b", 1, "24 GB (L4)"),
        Served("target", "llama-8b", 1, H100),
        Served("target", "llama-70b", 2, H100),
        Served("target", "llama-70b", 4, H100),
        Served("target", "llama-70b", 8, H100),
        Served("target", "llama-70b", 2, "141 GB (H200)"),
        Served("target", "llama-405b", 8, H100),
        Served("target", "llama-405b", 16, H100),
        Served("target", "llama-405b", 8, "141 GB (H200)"),
    ),
    "drafts": (
        Served("draft", "llama-1b", 1, "24 GB (L4)"),
        Served("draft", "llama-8b", 1, "24 GB (L4)"),
        Served("draft", "llama-8b", 1, H100),
    ),
}


def example_tables() -> dict[str, str]:
    """Return the tables of the example by the name of their marks.

    Memory of each service on a GPU; sessions of each length that fit in the smaller of the caches;
    and the most tokens per second of one session, by draft model, K and acceptance. Drafting and
    verifying read the memory of one GPU in turn, whatever overlaps in time.
    """
    memory = [
        [
            f"{one.role}, {one.shape}",
            f"{one.share:g} of {readable(GPUS[H100])}: {readable(one.fit.limit)}",
            *(readable(one.fit.taken[part]) for part in ("weights", "CUDA", "activations")),
            readable(one.fit.left), readable(one.bytes_per_token), f"{one.cache_tokens:,}",
        ]
        for one in EXAMPLE
    ]  # fmt: skip
    least = min(one.cache_tokens for one in EXAMPLE)
    verify = EXAMPLE[0].step_s()
    bounds = [["none", "-", "1", f"{1e3 * verify:.1f}", "-", f"{1 / verify:.0f}"]]
    for shape, k, acceptance in product(("llama-8b", "llama-1b"), KS, ACCEPTANCE):
        draft = k * Served("draft", shape).step_s()
        tokens = tokens_per_round(acceptance, k)
        bounds.append([
            f"{shape}, K = {k}", f"{acceptance:g}", f"{tokens:.2f}", f"{1e3 * verify:.1f}",
            f"{1e3 * draft:.1f}", f"{tokens / (verify + draft):.0f}",
        ])  # fmt: skip
    return {
        "memory": markdown(
            ["on each of its GPUs", "may use", "weights", "CUDA", "activations",
             "left for the cache", "a token", "tokens"], memory,
        ),
        "sessions": markdown(
            ["tokens of a session", "sessions at once"],
            [[f"{length:,}", f"{least // length:,}"] for length in LENGTHS],
        ),
        "bounds": markdown(
            ["drafts", "acceptance", "tokens/round", "verify, ms", "draft, ms",
             "tokens/s, at most"], bounds,
        ),
    }  # fmt: skip


def tokens_per_round(acceptance: float, k: int) -> float:
    """Return the mean tokens of a round of K drafts, each accepted alike if reached."""
    return (1 - acceptance ** (k + 1)) / (1 - acceptance)


def fitting_tables() -> dict[str, str]:
    """Return the tables of targets and draft models that fit, by the name of their marks."""
    columns = ["model", "GPUs", "weights", "activations", "left for the cache", "a token",
               "tokens", f"sessions of {MAX_MODEL_LEN:,}"]  # fmt: skip
    return {name: markdown(columns, map(_row, models)) for name, models in FITTING.items()}


def _row(one: Served) -> list[str]:
    fit, tokens = one.fit, one.cache_tokens
    row = [one.shape.removeprefix("llama-").upper(), f"{one.ranks} x {one.gpu}",
           readable(fit.taken["weights"]), readable(fit.taken["activations"])]  # fmt: skip
    if tokens < MAX_MODEL_LEN:
        return [*row, f"does not fit in {readable(fit.limit)}", "", "", "0"]
    return [*row, readable(fit.left), readable(one.bytes_per_token), f"{tokens:,}",
            f"{tokens // MAX_MODEL_LEN:,}"]  # fmt: skip


@with_flags
def sizes(
    example: Annotated[Path, Flag("Document of the example.")] = Path("docs/measurements/gpu.md"),
    document: Annotated[Path, Flag("Document of what fits.")] = Path(
        "docs/serve-your-own-models.md"
    ),
) -> None:
    """Write what fits on which GPUs into documents, between <!-- NAME --> and <!-- /NAME -->."""
    write_into(example, example_tables())
    write_into(document, fitting_tables())


if __name__ == "__main__":
    run(single(sizes))
