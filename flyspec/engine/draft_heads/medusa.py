"""Medusa heads (arXiv 2401.10774): each guesses one of the next tokens from the last hidden row.

Head k, from 0, guesses the token k + 2 positions after its row; the target's own output layer has
the one before. A guess does not depend on the others, so the heads need no cache.

Layouts. FasterDecoding's: `medusa_num_heads`, `medusa_num_layers`, and, as the state of a list of
heads, `K.L.linear.weight` and `.bias` of residual block L and `K.N.weight` of the output layer
after N blocks, perhaps after `medusa_head.`; the file is medusa_lm_head.safetensors. vLLM's:
`num_heads`, `num_hidden_layers`, `blocks.K.layers.L.weight`, with a bias if `medusa_fc_bias`, and
`lm_heads.K.weight`, which is one for all with `original_lm_head`; `token_map` names the tokens of
`truncated_vocab_size` that can be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flyspec.engine import stepwise
from flyspec.engine.draft_heads.base import HeadStep, check_step, draw_of, over_vocabulary
from flyspec.engine.draft_heads.files import HeadFiles, fingerprint_of
from flyspec.engine.draft_heads.target import HeadTarget, computing_type
from flyspec.engine.model import Rows, Step
from flyspec.model_files import INDEX, WEIGHTS
from flyspec.values.tokens import Drafted

FILES = (INDEX, WEIGHTS, "medusa_lm_head.safetensors")


@dataclass(frozen=True, eq=False)
class MedusaWeights:
    """One head: its residual blocks' weights [hidden, hidden] and biases, and its output layer."""

    blocks: Sequence[tuple[Tensor, Tensor | None]]
    lm_head: Tensor

    def logits(self, rows: Tensor) -> Tensor:
        """Return the logits of hidden rows [rows, hidden size]."""
        for weight, bias in self.blocks:
            rows = rows + F.silu(F.linear(rows, weight, bias))
        return F.linear(rows, self.lm_head)


class MedusaHead:
    """All Medusa heads of a target; `token_map` are the ids that can be drafted, None for all."""

    kind = "medusa"

    def __init__(
        self,
        heads: Sequence[MedusaWeights],
        token_map: Tensor | None,
        target: HeadTarget,
        num_slots: int,
        num_parameters: int,
        fingerprint: str,
    ) -> None:
        self.hidden_layers = (target.num_layers,)
        self.max_tokens = len(heads)
        self.num_parameters, self.fingerprint = num_parameters, fingerprint
        self._heads, self._map = heads, token_map
        self._hidden_size, self._vocab_size = target.hidden_size, target.vocab_size
        self._held = [0] * num_slots

    def held(self, slot: int) -> int:
        """Return the end of the positions that it was given; it needs none of them."""
        return self._held[slot]

    def forget(self, slot: int) -> None:
        self._held[slot] = 0

    @torch.inference_mode()
    def draft(self, steps: Sequence[HeadStep]) -> list[Drafted]:
        """Like `DraftHead.draft`. Raises `ValueError` for rows that do not fit the head."""
        for step in steps:
            check_step(step, self, self._hidden_size, self._vocab_size)
        for step in steps:
            self._held[step.slot] = step.start + len(step.token_ids)
        wanted = [step for step in steps if step.max_tokens]
        places = {step.slot: i for i, step in enumerate(wanted)}
        like = self._heads[0].lm_head
        rows = torch.cat([like.new_empty(0, self._hidden_size)] + [
            step.hidden[0][-1:].to(like.device, like.dtype) for step in wanted
        ])  # fmt: skip
        heads = iter(self._heads)

        def forward(now: Sequence[Step]) -> list[Rows]:
            own = next(heads).logits(rows[[places[step.slot] for step in now]])
            logits = over_vocabulary(own, self._map, self._vocab_size)
            return [Rows(logits[i : i + 1]) for i in range(len(now))]

        drawn = iter(stepwise.draw(forward, [draw_of(step) for step in wanted]) if wanted else ())
        return [next(drawn) if step.max_tokens else Drafted([]) for step in steps]


def is_medusa(config: Mapping[str, Any]) -> bool:
    """True if a head's config.json declares Medusa heads."""
    return "medusa_num_heads" in config or config.get("model_type") == "medusa"


def read_medusa(files: HeadFiles, target: HeadTarget, num_slots: int) -> MedusaHead:
    """Load Medusa heads for a target. Raises `ConfigError` that says what does not fit."""
    config = files.config
    own = any(".layers." in name or "lm_head" in name for name in files.places)
    if own:  # vLLM's
        count = files.number(config, "num_heads", config.get("medusa_num_heads"))
        depth = files.number(config, "num_hidden_layers", config.get("medusa_num_layers", 1))
    else:
        count = files.number(config, "medusa_num_heads")
        depth = files.number(config, "medusa_num_layers", 1)
    for name, needed in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if config.get(name, needed) != needed:
            raise files.wrong(
                f"it is for a target with {name} {config[name]}; {target.name} has {needed}"
            )
    hidden, size = target.hidden_size, target.vocab_size
    token_map = _token_map(files, target) if own else None
    biased = bool(config.get("medusa_fc_bias")) if own else True
    shared = own and bool(config.get("original_lm_head"))
    expected: dict[str, list[int]] = {}
    for k in range(count):
        for layer in range(depth):
            block = f"blocks.{k}.layers.{layer}" if own else f"{k}.{layer}.linear"
            expected[f"{block}.weight"] = [hidden, hidden]
            if biased:
                expected[f"{block}.bias"] = [hidden]
        expected[_output(k, depth, own, shared)] = [size, hidden]
    if token_map is not None and _is_truncated(files, _output(0, depth, own, shared), token_map):
        size = len(token_map)
        expected |= {_output(k, depth, own, shared): [size, hidden] for k in range(count)}
    whole = shared and not any(each in files.places for each in _names("lm_heads.0.weight"))
    if whole:
        del expected["lm_heads.0.weight"]
    tensors = files.read(expected, _names)
    fingerprint = fingerprint_of(tensors, config)
    num_parameters = sum(tensor.numel() for tensor in tensors.values())
    if whole:
        tensors["lm_heads.0.weight"] = target.lm_head
    dtype = computing_type(target, num_parameters)
    if token_map is not None and size == target.vocab_size:
        for name in {_output(k, depth, own, shared) for k in range(count)}:
            tensors[name] = tensors[name][token_map]
    placed = {name: tensor.to(target.device, dtype) for name, tensor in tensors.items()}
    heads = []
    for k in range(count):
        names = [f"blocks.{k}.layers.{i}" if own else f"{k}.{i}.linear" for i in range(depth)]
        blocks = [(placed[f"{name}.weight"], placed.get(f"{name}.bias")) for name in names]
        heads.append(MedusaWeights(blocks, placed[_output(k, depth, own, shared)]))
    if token_map is not None:
        token_map = token_map.to(target.device)
    return MedusaHead(heads, token_map, target, num_slots, num_parameters, fingerprint)


def _output(k: int, depth: int, own: bool, shared: bool) -> str:
    """Return the name of a head's output layer."""
    return f"lm_heads.{0 if shared else k}.weight" if own else f"{k}.{depth}.weight"


def _names(name: str) -> list[str]:
    return [name, f"medusa_head.{name}", f"medusa_heads.{name}"]


def _token_map(files: HeadFiles, target: HeadTarget) -> Tensor | None:
    size = files.number(files.config, "truncated_vocab_size", target.vocab_size)
    if size == target.vocab_size:
        return None
    ids = files.read({"token_map": [size]}, _names)["token_map"].to(torch.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < target.vocab_size or len(ids.unique()) < size:
        raise files.wrong(f"token_map has no {size} different ids below {target.vocab_size}")
    return ids


def _is_truncated(files: HeadFiles, name: str, token_map: Tensor) -> bool:
    stored = next((each for each in _names(name) if each in files.places), None)
    return stored is not None and len(files.tensor(stored)) == len(token_map)
