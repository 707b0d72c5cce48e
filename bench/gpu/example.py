"""The worked example of docs/gpu.md: what fits on four GPUs, and what their bandwidth bounds.

Memory is what the services calculate before they load anything (`flyspec.engine.cache_size`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from flyspec.config import DraftSettings, ModelServerSettings, VerifySettings
from flyspec.engine.cache_size import Fit, activation_bytes
from flyspec.engine.checkpoint import Checkpoint
from flyspec.engine.device_memory import OUTSIDE_TORCH, DeviceMemory
from flyspec.engine.heads import replicated_numbers
from flyspec.engine.memory import plan_kv_cache, readable, slot_bytes
from flyspec.tables import markdown
from flyspec_lab.bench.shapes import SHAPES

GPU_BYTES = 81_559 << 20
"""What the driver reports of an H100 of 80 GB."""
BANDWIDTH = 3.35e12
"""Bytes per second of its memory, nominal."""
DTYPE = torch.bfloat16
MAX_MODEL_LEN = 32_768
RANKS = 4
SHARES = {"target": 0.54, "draft": 0.37}
"""`--gpu-memory-utilization` of each: the draft model is on one of the target's GPUs."""
LENGTHS = (2_048, 8_192, 32_768)
CONTEXT = 4_096
ACCEPTANCE = (0.7, 0.8, 0.9)
KS = (4, 15)


@cache
def num_parameters(shape: str) -> int:
    """Return how many weights a model of a shape has."""
    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(SHAPES[shape].config()).num_parameters())


@dataclass(frozen=True)
class Served:
    """A model of a shape, as a service would serve it on GPUs of which each holds a share.

    `gpu_bytes` is what the driver reports of one of them.
    """

    role: str
    shape: str
    ranks: int
    settings: ModelServerSettings
    gpu_bytes: int = GPU_BYTES

    @property
    def config(self) -> Any:
        return SHAPES[self.shape].config()

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
        """What the service compares before it loads."""
        device, config = torch.device("cuda", 0), self.config
        length = self.settings.max_model_len
        checkpoint = Checkpoint(self.shape, config, DTYPE, device, length, self.ranks, Path())
        memory = DeviceMemory(self.gpu_bytes, self.gpu_bytes - OUTSIDE_TORCH, OUTSIDE_TORCH)
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


def served() -> tuple[Served, Served]:
    """The target over all GPUs, and the draft model on one of them."""
    target = VerifySettings(
        model="llama-70b",
        tensor_parallel_size=RANKS,
        max_model_len=MAX_MODEL_LEN,
        gpu_memory_utilization=SHARES["target"],
    )
    draft = DraftSettings(
        model="llama-8b", max_model_len=MAX_MODEL_LEN, gpu_memory_utilization=SHARES["draft"]
    )
    return Served("target", "llama-70b", RANKS, target), Served("draft", "llama-8b", 1, draft)


def memory_table() -> str:
    """What each service takes on a GPU, and what is left for its cache."""
    rows = []
    for one in served():
        fit = one.fit
        rows.append([
            f"{one.role}, {one.shape}",
            f"{SHARES[one.role]:g} of {readable(GPU_BYTES)}: {readable(fit.limit)}",
            *(readable(fit.taken[part]) for part in ("weights", "CUDA", "activations")),
            readable(fit.left), readable(one.bytes_per_token), f"{one.cache_tokens:,}",
        ])  # fmt: skip
    return markdown(
        ["on each of its GPUs", "may use", "weights", "CUDA", "activations", "left for the cache",
         "a token", "tokens"],
        rows,
    )  # fmt: skip


def sessions_table() -> str:
    """How many sessions of each length fit at once in the smaller of the two caches."""
    least = min(one.cache_tokens for one in served())
    return markdown(
        ["tokens of a session", "sessions at once"],
        [[f"{length:,}", f"{least // length:,}"] for length in LENGTHS],
    )


def step_seconds(num_bytes: float) -> float:
    return num_bytes / BANDWIDTH


def tokens_per_round(acceptance: float, k: int) -> float:
    """Mean tokens of a round of K drafts, each accepted with this probability if reached."""
    return (1 - acceptance ** (k + 1)) / (1 - acceptance)


def bounds_table(drafts: Sequence[str] = ("llama-8b", "llama-1b")) -> str:
    """The most tokens per second of one session, by draft model, K and acceptance.

    Drafting and verifying read the memory of one GPU in turn, whatever overlaps in time.
    """
    target, _ = served()
    own = target.weight_bytes // RANKS + CONTEXT * target.bytes_per_token
    verify = step_seconds(own)
    rows = [["none", "-", "1", f"{1e3 * verify:.1f}", "-", f"{1 / verify:.0f}"]]
    for shape in drafts:
        draft = Served("draft", shape, 1, DraftSettings())
        drafted = step_seconds(draft.weight_bytes + CONTEXT * draft.bytes_per_token)
        for k in KS:
            for acceptance in ACCEPTANCE:
                tokens = tokens_per_round(acceptance, k)
                rate = tokens / (verify + k * drafted)
                rows.append([
                    f"{shape}, K = {k}", f"{acceptance:g}", f"{tokens:.2f}", f"{1e3 * verify:.1f}",
                    f"{1e3 * k * drafted:.1f}", f"{rate:.0f}",
                ])  # fmt: skip
    return markdown(
        ["drafts", "acceptance", "tokens/round", "verify, ms", "draft, ms", "tokens/s, at most"],
        rows,
    )


def example_parts() -> dict[str, str]:
    """The parts of the document that follow from the planner alone, by the name of their marks."""
    return {
        "memory": memory_table(),
        "sessions": sessions_table(),
        "bounds": bounds_table(),
    }
