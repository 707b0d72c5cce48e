"""What replay needs, in one file: the target's text of each prompt, in rounds of exact decoding.

A round begins where exact decoding with K drafts begins one. It has the drafts, what both models
say about each of them, and for each mismatch that a rule might accept the score of the text that
the target writes after it: the mismatch is put in, and the target finishes greedily. That is how
AutoJudge labels mismatches (arXiv 2504.20039); here the drafts before it stand, too.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from flyspec.errors import ConfigError

VERSION = 1
_META = b"flyspec.recording"
Floats = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class RecordedText:
    """The target's own text, `num_tokens` long, and its score, from 0 to 1."""

    prompt_id: str
    prompt_length: int
    num_tokens: int
    score: float


@dataclass(frozen=True)
class RecordedRound:
    """A round of n drafts at index `start` of text number `text`.

    `logits` and `logit_ids` [n + 1, k]: the target's largest raw logits, in order. `log_totals` and
    `entropies` [n + 1]: logsumexp and entropy, nats, of all raw logits. `draft_log_probs` and
    `draft_ids` [n, m]: the draft's most likely tokens. `fork_scores` [n]: the score of the text
    after a mismatch was put in, NaN where none was.
    """

    text: int
    start: int
    draft_token_ids: list[int]
    logits: Floats
    logit_ids: Ids
    log_totals: Floats
    entropies: Floats
    draft_log_probs: NDArray[np.float16]
    draft_ids: Ids
    fork_scores: Floats


@dataclass(frozen=True)
class TuningRecordInfo:
    """What was recorded, and how."""

    target: str
    target_fingerprint: str
    draft: str
    task: str
    vocab_size: int
    num_speculative_tokens: int
    max_tokens: int
    eos_token_ids: tuple[int, ...]
    control_token_ids: tuple[int, ...]
    flyspec_version: str
    version: int = VERSION


@dataclass(frozen=True)
class TuningRecord:
    """The rounds of all texts, in the order in which they were made."""

    info: TuningRecordInfo
    texts: Sequence[RecordedText]
    rounds: Sequence[RecordedRound]

    @property
    def num_positions(self) -> int:
        """Positions at which the target's logits are recorded."""
        return sum(len(r.log_totals) for r in self.rounds)

    def save(self, path: Path) -> None:
        """Write it as Parquet: a row per round, with its text's facts repeated."""
        rows = [_row(r, self.texts[r.text]) for r in self.rounds]
        table = pa.Table.from_pylist(rows, schema=_SCHEMA)
        meta = {**asdict(self.info), "texts": [asdict(t) for t in self.texts]}
        table = table.replace_schema_metadata({_META: json.dumps(meta).encode()})
        parquet.write_table(table, path, compression="zstd")

    @classmethod
    def load(cls, path: Path) -> TuningRecord:
        """Read one. Raises `ConfigError` if the file is none, or of another version."""
        try:
            table = parquet.read_table(path)
        except (OSError, pa.ArrowInvalid) as error:
            raise ConfigError(f"{path}: cannot be read as a recording: {error}") from None
        found = (table.schema.metadata or {}).get(_META)
        if found is None:
            raise ConfigError(f"{path}: a Parquet file, but not a recording of `flyspec tune`")
        meta = json.loads(found)
        if meta["version"] != VERSION:
            raise ConfigError(
                f"{path}: of version {meta['version']}, this flyspec reads {VERSION}; record again"
            )
        texts = [RecordedText(**text) for text in meta.pop("texts")]
        for name in ("eos_token_ids", "control_token_ids"):
            meta[name] = tuple(meta[name])
        return cls(TuningRecordInfo(**meta), texts, [_round(row) for row in table.to_pylist()])


_SCHEMA = pa.schema(
    [
        ("text", pa.int32()),
        ("prompt_id", pa.string()),
        ("start", pa.int32()),
        ("draft_token_ids", pa.list_(pa.int32())),
        ("logits", pa.list_(pa.float32())),
        ("logit_ids", pa.list_(pa.int32())),
        ("log_totals", pa.list_(pa.float32())),
        ("entropies", pa.list_(pa.float32())),
        ("draft_log_probs", pa.list_(pa.float16())),
        ("draft_ids", pa.list_(pa.int32())),
        ("fork_scores", pa.list_(pa.float32())),
    ]
)
_ARRAYS: Mapping[str, Any] = {
    "logits": np.float32, "logit_ids": np.int32, "log_totals": np.float32,
    "entropies": np.float32, "draft_log_probs": np.float16, "draft_ids": np.int32,
    "fork_scores": np.float32,
}  # fmt: skip


def _row(round_: RecordedRound, text: RecordedText) -> dict[str, Any]:
    flat = {name: getattr(round_, name).reshape(-1) for name in _ARRAYS}
    return {
        "text": round_.text,
        "prompt_id": text.prompt_id,
        "start": round_.start,
        "draft_token_ids": round_.draft_token_ids,
        **flat,
    }


def _round(row: Mapping[str, Any]) -> RecordedRound:
    drafts = row["draft_token_ids"]
    arrays = {name: np.array(row[name], dtype) for name, dtype in _ARRAYS.items()}
    for name, count in {
        "logits": len(drafts) + 1, "logit_ids": len(drafts) + 1,
        "draft_log_probs": len(drafts), "draft_ids": len(drafts),
    }.items():  # fmt: skip
        arrays[name] = arrays[name].reshape(count, -1)
    return RecordedRound(row["text"], row["start"], drafts, **arrays)
