"""Loads a draft head of any known format beside its target."""

from __future__ import annotations

from pathlib import Path

from flyspec.engine.draft_heads.base import DraftHead
from flyspec.engine.draft_heads.eagle3_layouts import is_eagle3, read_eagle3
from flyspec.engine.draft_heads.files import HeadFiles
from flyspec.engine.draft_heads.medusa import FILES, is_medusa, read_medusa
from flyspec.engine.draft_heads.mtp import is_mtp, read_mtp
from flyspec.engine.draft_heads.target import HeadTarget
from flyspec.engine.loading import LoadedModel


def load_head(directory: Path, target: LoadedModel | HeadTarget, num_slots: int) -> DraftHead:
    """Load the head in a directory for a target with this many slots.

    The format is recognised from config.json. The head shares the target's embedding and output
    layer where the format does. Raises `ConfigError` that names the tensors that are missing or of
    another shape, or says why the head does not fit the target.
    """
    files = HeadFiles(directory, FILES)
    if isinstance(target, LoadedModel):
        target = HeadTarget.of(target)
    if is_eagle3(files.config):
        return read_eagle3(files, target, num_slots)
    if is_medusa(files.config):
        return read_medusa(files, target, num_slots)
    if is_mtp(files):
        return read_mtp(files, target, num_slots)
    raise files.wrong("config.json declares no head that is known: EAGLE-3, Medusa or MTP")
