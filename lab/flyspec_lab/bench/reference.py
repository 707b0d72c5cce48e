"""An independent baseline: the target as transformers runs it, in this process."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from flyspec.engine.logits import process_logits
from flyspec.engine.sampling import gumbel_noise
from flyspec.errors import ConfigError
from flyspec.values.tokens import SamplingParams


class Reference:
    """A target run by transformers. `dtype` is a name in torch; `threads` 0 leaves them as is."""

    def __init__(self, model: str, dtype: str, threads: int = 0, device: str = "cpu") -> None:
        directory = Path(model).expanduser()
        if not (directory / "config.json").is_file():
            raise ConfigError(
                f"the reference needs the target's directory on this machine; {model} is not one"
            )
        if threads:
            torch.set_num_threads(threads)
        self._device = torch.device(device)
        disable_progress_bar()
        model_class: Any = AutoModelForCausalLM  # its annotations lack the return type
        loaded = model_class.from_pretrained(
            directory,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
        )
        self._model = loaded.to(self._device).eval()

    @property
    def module(self) -> Any:
        """The model itself, for use as an assistant."""
        return self._model

    @torch.inference_mode()
    def generate(
        self,
        prompt_token_ids: Sequence[int],
        max_tokens: int,
        ignore_eos: bool = False,
        **how: Any,
    ) -> list[int]:
        """Generate greedily, including an end of sequence; `how` is passed to transformers."""
        ids = torch.tensor([list(prompt_token_ids)], device=self._device)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=max_tokens,
            min_new_tokens=max_tokens if ignore_eos else None,
            # The checkpoint's own sampling defaults do not apply to greedy decoding.
            temperature=None,
            top_p=None,
            top_k=None,
            **how,
        )
        tokens: list[int] = output[0, ids.shape[1] :].tolist()
        return tokens

    @torch.inference_mode()
    def is_tie(
        self,
        token_ids: Sequence[int],
        candidates: Set[int],
        sampling: SamplingParams,
        seed: int,
        tolerance: float,
    ) -> bool:
        """Return whether rounding can decide which of `candidates` follows `token_ids`.

        It can if the two best are within `tolerance` nats of each other, or if changing top-p by as
        much lets another of them win.
        """
        ids = torch.tensor([list(token_ids)], device=self._device)
        logits = self._model(ids, logits_to_keep=1).logits[:, -1].double()
        position = len(token_ids)
        winners = set()
        for top_p in {sampling.top_p, *_near(sampling.top_p, tolerance)}:
            scores = process_logits(logits, replace(sampling, top_p=top_p))[0]
            if not sampling.greedy:
                noise = gumbel_noise(scores.numel(), [position], seed, device=self._device)
                scores = scores + noise[0]
            best = scores.topk(2)
            # Processed logits are divided by the temperature.
            if float(best.values[0] - best.values[1]) <= tolerance / (sampling.temperature or 1.0):
                return True
            winners.add(int(best.indices[0]))
        return candidates <= winners


def _near(top_p: float, tolerance: float) -> Sequence[float]:
    """Return top-p values on both sides; 1 keeps everything and has none."""
    return () if top_p >= 1.0 else (top_p - tolerance, min(1.0, top_p + tolerance))
