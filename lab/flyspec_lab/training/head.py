"""From a target and prompts to a head's directory: has the target write, trains, saves."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig

from flyspec.bundled import TARGET
from flyspec.cli.program import check_file
from flyspec.config import VerifySettings
from flyspec.engine.draft_heads.eagle3_layouts import read_weights
from flyspec.engine.draft_heads.eagle3_network import Eagle3Shape
from flyspec.engine.draft_heads.files import HeadFiles
from flyspec.engine.draft_heads.target import HeadTarget
from flyspec.engine.native.family import head_dim
from flyspec.errors import ConfigError
from flyspec.progress import progress, working
from flyspec.values.tokens import SamplingParams
from flyspec.version import __version__
from flyspec_lab.interrupting import UntilCtrlC, whatever_reached
from flyspec_lab.local_model import LocalModel
from flyspec_lab.report import Report
from flyspec_lab.training.eagle3_files import write_eagle3
from flyspec_lab.training.head_trainer import (
    ALONE_UNTIL,
    HeadTrainer,
    LearntText,
    batches,
    frequent_tokens,
)
from flyspec_lab.training.options import HeadTrainOptions

_SLOTS = 64
_SAVED_EVERY_S = 180.0


def train(o: HeadTrainOptions) -> Report:
    """Train an EAGLE-3 head, write it, and report on its training. Raises `ConfigError`.

    Raises `StoppedEarly` with the report on the head as it is by then if Ctrl-C was pressed.
    """
    folder = o.head_directory.expanduser()
    check_file("--head-directory", folder)
    with working("loading the target"):
        settings = VerifySettings(
            model=o.model or str(TARGET), dtype=o.dtype, device=o.device, threads=o.threads,
            max_sessions=_SLOTS,
        )  # fmt: skip
        model = LocalModel(settings, for_heads=True)
    target = model.head_target
    assert target is not None
    before = o.init_head and read_weights(HeadFiles(o.init_head.expanduser()), target)
    shape = before.shape if before else shape_for(target, o)
    began = time.perf_counter()
    texts = write_texts(model, o)
    written = time.perf_counter()
    tokens = before.draft_token_ids if before else None
    if tokens is None:
        tokens = frequent_tokens(texts, shape.draft_vocab_size, target.vocab_size)
    trainer = HeadTrainer(
        shape, target, tokens, ttt_steps=o.ttt_steps, seed=o.seed, muon_lr=o.muon_lr,
        adam_lr=o.adam_lr, length=target.context_length, alone_until=0 if before else ALONE_UNTIL,
    )  # fmt: skip
    if before:
        trainer.network.load_published({"lm_head.weight": target.lm_head, **before.tensors})
    size = sum(len(text.token_ids) for text in texts)
    facts = {
        "target": target.name,
        "target_weights_fingerprint": target.weights_fingerprint,
        "learnt_from": [Path(path or name).name for name, path in o.tasks],
        "continued": before is not None,
        "seed": o.seed,
        "ttt_steps": o.ttt_steps,
        "texts": len(texts),
        "flyspec_version": __version__,
    }

    def save() -> dict[str, Any]:
        now = {**facts, "trained_tokens": trainer.tokens, "steps": trainer.step}
        write_eagle3(folder, trainer.network, tokens, target.vocab_size, now)
        return now

    def run() -> None:
        generator = torch.Generator().manual_seed(o.seed)
        total, saved = o.epochs * size, written
        with UntilCtrlC() as until, progress("training", total) as advance:
            for _ in range(o.epochs):
                for batch in batches(texts, model, shape.aux_layers, o.batch_tokens, generator):
                    now = time.perf_counter()
                    done = max(trainer.tokens / total, (now - written) / (60 * o.minutes))
                    if done >= 1.0:
                        break
                    trainer.train_step(batch, done)
                    until.reached = True
                    advance(batch.size)
                    if now - saved > _SAVED_EVERY_S:
                        save()
                        saved = now
        until.result(None)

    def trained(_: None) -> Report:
        known = set(tokens.tolist())
        learnt = [token for text in texts for token in text.token_ids[text.first :]]
        found = {
            **save(),
            "head_directory": str(o.head_directory),
            "parameters": sum(p.numel() for p in trainer.network.parameters()),
            "tokens": size,
            "agreement": [round(share, 4) for share in trainer.agreement],
            "coverage": sum(token in known for token in learnt) / len(learnt),
            "writing_s": written - began,
            "training_s": time.perf_counter() - written,
        }
        shares = ", ".join(f"{share:.1%}" for share in trainer.agreement)
        summary = (
            f"{found['parameters'] / 1e6:.2f} M parameters, trained on {trainer.tokens:,} tokens "
            f"of {len(texts):,} texts in {trainer.step:,} steps. At the end it had the target's "
            f"most likely token, by unrolled step: {shares}. It can draft {found['coverage']:.1%} "
            f"of the tokens it learnt. Writing took {found['writing_s']:.0f} s, training "
            f"{found['training_s']:.0f} s. Wrote {o.head_directory}."
        )
        return Report(found, [summary])

    return whatever_reached(run, trained)


def write_texts(model: LocalModel, o: HeadTrainOptions) -> list[LearntText]:
    """Have the target go on with each prompt: every other one greedily, the rest sampled.

    Raises `ConfigError`.
    """
    encoded = [model.encode(problem.prompt) for _, problem in o.read()]
    found: list[LearntText] = []
    with progress("writing texts", len(encoded)) as advance:
        for part, temperature in ((encoded[::2], 0.0), (encoded[1::2], 1.0)):
            # Of similar lengths together, so that few wait for the longest.
            own, sampling = sorted(part, key=len), SamplingParams(temperature=temperature)
            drawn = model.continued(own, [o.max_tokens] * len(own), advance, sampling, o.seed)
            found += (
                LearntText([*ids, *tokens], len(ids))
                for ids, tokens in zip(own, drawn, strict=True)
                if tokens
            )
    return found


def shape_for(target: HeadTarget, o: HeadTrainOptions) -> Eagle3Shape:
    """Return the shape of a head for a target: as wide, with three quarters of its attention heads
    and no more than a third of these as KV heads. Raises `ConfigError`."""
    config, hidden = target.config, target.hidden_size
    layers = default_layers(target.num_layers)
    dim = head_dim(config)
    heads = max(1, hidden // dim)
    kv_heads = next(n for n in range(max(1, heads // 3), 0, -1) if heads % n == 0)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    layer = LlamaConfig(
        vocab_size=target.vocab_size,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=target.context_length,
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10_000.0)},
    )
    return Eagle3Shape(layer, hidden, layers, min(o.draft_vocab_size, target.vocab_size))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """Return a low, a middle and a high layer: EAGLE-3's 2, L / 2 and L - 3 where they differ."""
    published = (2, num_layers // 2, num_layers - 3)
    if 0 < published[0] < published[1] < published[2]:
        return published
    if num_layers < 4:
        raise ConfigError(f"a target of {num_layers} layers is too small for an EAGLE-3 head")
    return (1, num_layers // 2, num_layers - 1)
