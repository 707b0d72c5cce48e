"""Loads a draft head of any known format beside its target."""

from __future__ import annotations

from pathlib import Path

from flyspec.config import DraftSettings
from flyspec.engine.draft_heads.base import DraftHead
from flyspec.engine.draft_heads.eagle3_layouts import is_eagle3, read_eagle3
from flyspec.engine.draft_heads.files import HeadFiles
from flyspec.engine.draft_heads.medusa import FILES, is_medusa, read_medusa
from flyspec.engine.draft_heads.model_head import ModelHead
from flyspec.engine.draft_heads.mtp import is_mtp, read_mtp
from flyspec.engine.draft_heads.target import HeadTarget
from flyspec.engine.loading import LoadedModel
from flyspec.errors import ConfigError
from flyspec.flags import FlashAttention
from flyspec.model_files import is_gguf


def load_head(
    directory: Path,
    target: LoadedModel | HeadTarget,
    num_slots: int,
    flash_attn: FlashAttention = "auto",
) -> DraftHead:
    """Load the head in a directory for a target with this many slots.

    The format is recognised from config.json; a GGUF file is a draft model, with `flash_attn`. The
    head shares the target's embedding and output layer where the format does. Raises `ConfigError`
    that names the tensors that are missing or of another shape, or says why the head does not fit
    the target.
    """
    if isinstance(target, LoadedModel) and is_gguf(str(directory)):
        return _read_gguf(str(directory), target, num_slots, flash_attn)
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


def _read_gguf(
    name: str, target: LoadedModel, num_slots: int, flash_attn: FlashAttention
) -> DraftHead:
    """Load a draft model in llama.cpp with as many slots as the target has, each as long."""
    from flyspec.engine.llama_cpp.loading import load  # needs an extra

    own = target.info
    settings = DraftSettings(
        model=name,
        max_sessions=num_slots,
        max_model_len=own.context_length,
        flash_attn=flash_attn,
    )
    loaded, model = load(settings, drafts=True)
    info = loaded.info
    if info.tokenizer_fingerprint != own.tokenizer_fingerprint:
        raise ConfigError(
            f"head {name}: its tokenizer is not that of {own.name}; a draft service translates: "
            "give it as --draft-model"
        )
    if info.context_length < own.context_length:
        raise ConfigError(
            f"head {name}: its context of {info.context_length} tokens is shorter than that of "
            f"{own.name}; lower --max-model-len to {info.context_length}"
        )
    if model.cache.num_slots < num_slots:
        raise ConfigError(
            f"head {name}: memory for {model.cache.num_slots} of the target's {num_slots} "
            "sessions; lower --max-sessions or --max-model-len"
        )
    model.warm_up()
    return ModelHead(model)
