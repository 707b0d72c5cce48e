"""From a target and a corpus to a head's directory: loads, has the target write, trains, saves."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig

from flyspec.bundled import TARGET
from flyspec.concurrency import UntilCtrlC, whatever_reached
from flyspec.config import VerifySettings
from flyspec.engine.draft_heads.eagle3_layouts import read_weights
from flyspec.engine.draft_heads.eagle3_network import Eagle3Shape
from flyspec.engine.draft_heads.files import HeadFiles
from flyspec.engine.draft_heads.target import HeadTarget
from flyspec.engine.native.family import head_dim
from flyspec.errors import ConfigError
from flyspec.progress import progress, working
from flyspec.version import __version__
from flyspec_lab.heads.eagle3_files import write_eagle3
from flyspec_lab.heads.options import ALL_CORPORA, HeadTrainOptions
from flyspec_lab.heads.texts import beginnings, continued
from flyspec_lab.heads.training import ALONE_UNTIL, HeadTrainer, batches, frequent_tokens
from flyspec_lab.local_model import LocalModel
from flyspec_lab.python_source import python_version

_SLOTS = 64
_SAVED_EVERY_S = 180.0


@dataclass(frozen=True)
class TrainedHead:
    """A head in its directory `output`, with facts of its training.

    `agreement`: how often each unrolled step had the target's most likely token, at the end of
    training. `coverage`: the share of the tokens to be learnt that the head can draft at all.
    """

    output: str
    parameters: int
    texts: int
    tokens: int
    trained_tokens: int
    steps: int
    agreement: tuple[float, ...]
    coverage: float
    writing_s: float
    training_s: float


def train(o: HeadTrainOptions) -> TrainedHead:
    """Train an EAGLE-3 head and write it. Raises `ConfigError`.

    Raises `StoppedEarly` with the head as it is by then if Ctrl-C was pressed.
    """
    folder = o.head_directory.expanduser()
    if not folder.parent.is_dir():
        raise ConfigError(
            f"--head-directory {o.head_directory}: no directory {o.head_directory.parent}"
        )
    whole = o.answers == "corpus"
    if whole and o.data:
        raise ConfigError("--answers corpus: --data has prompts alone; leave one of them out")
    with working("loading the target"):
        settings = VerifySettings(
            model=o.model or str(TARGET), dtype=o.dtype, device=o.device, threads=o.threads,
            max_sessions=_SLOTS,
        )  # fmt: skip
        model = LocalModel(settings, for_heads=True)
    target = model.head_target
    assert target is not None
    before = None
    if o.init_head is not None:
        before = read_weights(HeadFiles(o.init_head.expanduser()), target)
    corpora = ALL_CORPORA if o.corpora is None else o.corpora
    shape = before.shape if before else shape_for(target, o)
    began = time.perf_counter()
    with working("reading texts"):
        texts = beginnings(model, corpora, o.data, o.prompts, o.seed, whole)
    if not whole:
        with progress("writing texts", len(texts)) as advance:
            texts = continued(model, texts, o.max_tokens, o.seed, advance)
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
    known = set(tokens.tolist())
    learnt = [token for text in texts for token in text.token_ids[text.first :]]
    size = sum(len(text.token_ids) for text in texts)
    facts = {
        "target": target.name,
        "target_weights_fingerprint": target.weights_fingerprint,
        "corpora": [*(name for name, _ in corpora), *(Path(file).name for file in o.data)],
        "answers": o.answers,
        "continued": before is not None,
        "python": python_version(),
        "seed": o.seed,
        "ttt_steps": o.ttt_steps,
        "texts": len(texts),
        "flyspec_version": __version__,
    }

    def save() -> None:
        more = {"trained_tokens": trainer.tokens, "steps": trainer.step}
        write_eagle3(folder, trainer.network, tokens, target.vocab_size, facts | more)

    def run() -> None:
        generator = torch.Generator().manual_seed(o.seed)
        total = o.epochs * size
        saved = written
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

    def trained(_: None) -> TrainedHead:
        save()
        return TrainedHead(
            output=str(o.head_directory),
            parameters=sum(p.numel() for p in trainer.network.parameters()),
            texts=len(texts),
            tokens=size,
            trained_tokens=trainer.tokens,
            steps=trainer.step,
            agreement=tuple(round(share, 4) for share in trainer.agreement),
            coverage=sum(token in known for token in learnt) / len(learnt),
            writing_s=written - began,
            training_s=time.perf_counter() - written,
        )

    return whatever_reached(run, trained)


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
        intermediate_size=o.intermediate_size or 2 * hidden,
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
