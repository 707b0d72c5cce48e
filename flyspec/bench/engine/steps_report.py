"""What `steps` measures and what it found: plain values, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from flyspec.flags import Dtype


@dataclass(frozen=True)
class EngineOptions:
    """What is measured. `repeats` timed runs of everything follow one that is not.

    A step of batch B and K has B sequences, each with `contexts` tokens cached, and runs K + 1
    tokens of each. `chunks` are tokens a step of a prompt as long as the longest context.
    """

    model: str
    device: str = "auto"
    dtype: Dtype = "auto"
    threads: int = 0
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    num_speculative_tokens: Sequence[int] = (0, 4, 8, 16)
    contexts: Sequence[int] = (128, 512, 2048)
    chunks: Sequence[int] = (128, 256, 512, 1024)
    repeats: int = 7
    tensor_parallel_size: int = 1

    @property
    def slot_tokens(self) -> int:
        """Longest sequence of any step."""
        return max(self.contexts) + max(self.num_speculative_tokens) + 1

    @property
    def prompt_chunks(self) -> list[int]:
        """The chunks that a prompt can be cut into."""
        return [chunk for chunk in self.chunks if chunk <= max(self.contexts)]


class Cell(NamedTuple):
    """A kind of step."""

    batch: int
    num_speculative_tokens: int
    context: int


@dataclass(frozen=True)
class StepCost:
    """A kind of step. `tokens_per_second`: tokens verified, batch * (K + 1) a step.

    `step_ms` is the median, undisturbed; the parts are medians of runs in which they were timed
    one by one. `attention_ms` has its masks in it.
    """

    batch: int
    num_speculative_tokens: int
    context: int
    step_ms: float
    step_p90_ms: float
    tokens_per_second: float
    attention_ms: float
    cache_write_ms: float
    matrix_products_ms: float
    other_ms: float

    @property
    def attention_to_products(self) -> float:
        """Time of attention and masks over that of the matrix products."""
        return self.attention_ms / max(self.matrix_products_ms, 1e-9)

    @property
    def attention_share(self) -> float:
        """Of the step's time, in [0, 1]."""
        parts = self.attention_ms + self.cache_write_ms + self.matrix_products_ms + self.other_ms
        return self.attention_ms / parts


@dataclass(frozen=True)
class PrefillCost:
    """A prompt in chunks, one a step, alone; times of its first and of its last whole chunk."""

    chunk: int
    prompt_tokens: int
    tokens_per_second: float
    first_chunk_ms: float
    last_chunk_ms: float


@dataclass(frozen=True)
class EngineMemory:
    """Bytes of the slot cache and of the weights, of rank 0; `total_weights` of all ranks."""

    bytes_per_token: int
    bytes_per_slot: int
    slot_tokens: int
    num_slots: int
    cache_bytes: int
    weights: int
    total_weights: int


@dataclass(frozen=True)
class EngineRun:
    """All measurements of one tensor-parallel size."""

    tensor_parallel_size: int
    threads: int
    steps: Sequence[StepCost]
    prefill: Sequence[PrefillCost]
    memory: EngineMemory

    @property
    def batches(self) -> list[int]:
        """Sequences of the steps, each number once, ascending; so `ks` and `contexts`."""
        return sorted({s.batch for s in self.steps})

    @property
    def ks(self) -> list[int]:
        """Values of K."""
        return sorted({s.num_speculative_tokens for s in self.steps})

    @property
    def contexts(self) -> list[int]:
        """Tokens cached."""
        return sorted({s.context for s in self.steps})

    @property
    def middling_k(self) -> int:
        """8, or what is in the middle."""
        return 8 if 8 in self.ks else self.ks[len(self.ks) // 2]

    def cell(self, batch: int, k: int, context: int) -> StepCost:
        """A kind of step."""
        return next(
            s for s in self.steps
            if (s.batch, s.num_speculative_tokens, s.context) == (batch, k, context)
        )  # fmt: skip


@dataclass(frozen=True)
class EngineReport:
    """Runs over one model, one for each tensor-parallel size."""

    model: str
    dtype: str
    device: str
    repeats: int
    runs: Sequence[EngineRun]

    def to_document(self) -> dict[str, Any]:
        """The report as JSON."""
        return asdict(self)

    @classmethod
    def from_documents(cls, documents: Sequence[dict[str, Any]]) -> EngineReport:
        """One report of the runs of several documents about the same model."""
        runs = [
            EngineRun(
                tensor_parallel_size=run["tensor_parallel_size"],
                threads=run["threads"],
                steps=[StepCost(**step) for step in run["steps"]],
                prefill=[PrefillCost(**prefill) for prefill in run["prefill"]],
                memory=EngineMemory(**run["memory"]),
            )
            for document in documents
            for run in document["runs"]
        ]
        first = documents[0]
        return cls(first["model"], first["dtype"], first["device"], first["repeats"], runs)
