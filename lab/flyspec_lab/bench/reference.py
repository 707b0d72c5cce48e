"""An independent baseline: the target as transformers runs it, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from flyspec.errors import ConfigError


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
