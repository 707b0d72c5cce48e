"""`python -m flyspec_lab.bench.replay_service`: a draft service that replays the target's text.

It takes the draft service's flags; `--model` is the target's directory, for its tokenizer and
sizes. It asks the target through the orchestrator, which starts later: the file `--address-file`
has its address by the first proposal.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from draft_service import server
from draft_service.drafters.model import ModelDrafter
from draft_service.engine import Engine
from draft_service.sessions import Sessions
from draft_service.telemetry import DraftTelemetry
from flyspec.client import AsyncClient
from flyspec.config import DraftSettings
from flyspec.engine.model import Model
from flyspec.errors import ConfigError
from flyspec.rules import Rule
from flyspec.settings_sources import from_command_line
from flyspec.startup import end_on_sigterm
from flyspec.values.admin import ModelInfo
from flyspec.values.requests import GenerateOptions
from flyspec.values.tokens import MAX_TOP_LOGPROBS, TokenLogprobs
from flyspec_lab.bench.replay import DraftErrors, ReplayModel, Said

_ANSWER_TIMEOUT_S = 600.0


class ReplaySettings(DraftSettings):
    """A draft service's settings, and its errors."""

    model_config = SettingsConfigDict(env_prefix="FLYSPEC_DRAFT_")

    error_rate: float = Field(0.0, ge=0, le=1, description="fraction of wrong drafts")
    error_seed: int = Field(0, description="seed of their positions")
    exact_only: bool = Field(False, description="only rules that accept no errors")
    paced_by: str = Field("", description="draft model that takes its time for every draft")
    address_file: str = Field("", description="file with the orchestrator's address")


class AskedTarget:
    """The target, as the engine's thread asks it; the connection is on the event loop."""

    def __init__(self, address_file: Path, loop: asyncio.AbstractEventLoop) -> None:
        self._address_file, self._loop = address_file, loop
        self._client: AsyncClient | None = None

    def __call__(self, token_ids: Sequence[int], count: int) -> Sequence[Said]:
        """Return the target's greedy continuation, as `flyspec_lab.bench.replay.Ask`."""
        work = self._continue(list(token_ids), count)
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_ANSWER_TIMEOUT_S)

    async def _continue(self, token_ids: list[int], count: int) -> Sequence[Said]:
        if self._client is None:
            try:
                address = self._address_file.read_text().strip()
            except FileNotFoundError:  # the orchestrator tries its drafters before it is ready
                nothing = Said(0, TokenLogprobs(0.0, (0, 1), (0.0, -99.0)))
                return [nothing] * count
            self._client = AsyncClient(address, max_retries=0)
        generation = await self._client.complete(
            token_ids,
            GenerateOptions(
                max_tokens=count,
                num_speculative_tokens=0,
                rule=Rule("exact"),
                ignore_eos=True,
                disable_loop_guard=True,
                logprobs=MAX_TOP_LOGPROBS,
            ),
            patience_s=_ANSWER_TIMEOUT_S,
        )
        return list(map(Said, generation.token_ids, generation.logprobs))


async def build(
    settings: DraftSettings, observer: DraftTelemetry
) -> tuple[Sessions, Engine | None]:
    """As the draft service's `build`. Raises `ConfigError`."""
    from transformers import AutoTokenizer, GenerationConfig

    from flyspec.engine.bundle import tokenizer_bundle
    from flyspec.engine.configuration import read_config

    assert isinstance(settings, ReplaySettings)
    source, config = read_config(settings.model)
    bundle = tokenizer_bundle(
        AutoTokenizer.from_pretrained(source), GenerationConfig.from_pretrained(source)
    )
    info = ModelInfo(
        name=f"replay of {settings.model}",
        tokenizer_fingerprint=bundle.fingerprint,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        dtype="none",
        device="cpu",
    )
    target = AskedTarget(Path(settings.address_file), asyncio.get_running_loop())
    errors = DraftErrors(settings.error_rate, settings.error_seed)
    pace = _paced_by(settings, info) if settings.paced_by else None
    model = ReplayModel(
        info,
        settings.max_sessions,
        errors,
        target,
        bundle.eos_token_ids,
        not settings.exact_only,
        pace,
    )
    engine = Engine(model, on_step=observer.engine_metrics.step)
    await asyncio.wrap_future(engine.start())
    drafter = ModelDrafter(model, bundle.eos_token_ids)
    return Sessions([drafter], engine, settings), engine


def _paced_by(settings: ReplaySettings, target: ModelInfo) -> Model:
    """Load the model that drafting keeps pace with. Raises `ConfigError`."""
    from flyspec.engine.loading import load_model
    from flyspec.engine.native.choice import choose_model

    loaded = load_model(
        settings.paced_by, settings.device, settings.dtype, settings.max_model_len, identify=False
    )
    if loaded.info.vocab_size < target.vocab_size:
        raise ConfigError(
            f"--paced-by {settings.paced_by}: has {loaded.info.vocab_size} tokens, fewer than the "
            f"target's {target.vocab_size}"
        )
    return choose_model(loaded, settings)


def main() -> None:
    end_on_sigterm()
    from flyspec.serving import run

    run(server.serve(from_command_line(ReplaySettings, "draft_service"), build))


if __name__ == "__main__":
    main()
