"""`python -m demo.train`: trains the bundled models from scratch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from demo import corpus
from demo.batches import Batch, Batches, Mix
from demo.tokenizer import build_bytes, save, train_bpe
from flyspec.bundled import MODELS
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.flags import Flag
from flyspec_lab.python_source import is_held_out, python_files, python_version
from flyspec_lab.word_problems import problems

VOCAB_SIZE = 4096
CHECKPOINTS, CHECKPOINT_S = Path("out"), 300.0
"""Folder of checkpoints, and seconds of training between them."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Sizes of one model, as in its configuration, and its training."""

    sizes: Mapping[str, Any]
    phases: tuple[tuple[float, Mix], ...]  # rows, up to that fraction of the training
    steps: int
    minutes: float
    muon_lr: float
    adam_lr: float
    long: Mix | None = None  # replaces every 16th batch
    distilled: bool = False


_DRAFT = Recipe(
    sizes={
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
    },
    phases=(
        (0.3, Mix(256, problems=15, drills=4, code=5, copying=True)),
        (1.0, Mix(256, problems=18, drills=1, code=5, copying=True)),
    ),
    steps=1225,
    minutes=12,
    muon_lr=2e-2,
    adam_lr=4e-3,
    distilled=True,
)
RECIPES: Mapping[str, Recipe] = {
    "target": Recipe(
        sizes={
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 64,
        },
        phases=(
            (0.3, Mix(256, problems=11, drills=6, code=7)),  # the arithmetic is learnt first
            (0.6, Mix(256, problems=15, drills=1, code=8, copying=True)),
            (0.745, Mix(256, problems=19, drills=1, code=4, copying=True)),
            (1.0, Mix(256, problems=21, drills=1, code=2, copying=True, hard=True)),
        ),
        long=Mix(1024, problems=0, drills=0, code=6),
        steps=3600,
        minutes=90,
        muon_lr=1e-2,
        adam_lr=2e-3,
    ),
    "draft": _DRAFT,
    "draft-bytes": replace(
        _DRAFT,
        sizes={**_DRAFT.sizes, "num_hidden_layers": 4},
        phases=(
            (0.3, Mix(640, problems=9, drills=4, code=3, copying=True)),
            (1.0, Mix(640, problems=12, drills=1, code=3, copying=True)),
        ),
        steps=1500,
        minutes=7,
        distilled=False,
    ),
}


def build(recipe: Recipe, tokenizer: Tokenizer) -> LlamaForCausalLM:
    ids = {token: int(tokenizer.token_to_id(token) or 0) for token in corpus.SPECIAL_TOKENS}
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        **recipe.sizes,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=ids[corpus.BOS],
        eos_token_id=[ids[corpus.EOS], ids[corpus.END]],
        pad_token_id=ids[corpus.PAD],
    )
    model = LlamaForCausalLM(config)
    # With masks, and rows this short, faster than SDPA on a CPU.
    model.set_attn_implementation("eager")
    return model


def get_tokenizer(what: str, texts: list[str], seed: int, folder: Path) -> Tokenizer:
    """Return the model's tokenizer: the draft model has the target's, new if there is none."""
    if what == "draft-bytes":
        return build_bytes()
    path = folder / "target" / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    drawn = problems(f"tokenizer-{seed}", 12_000)
    return train_bpe([*map(corpus.chat_text, drawn), *texts], VOCAB_SIZE)


def save_model(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Save weights in bf16, configs and tokenizer for `from_pretrained`."""
    copy = LlamaForCausalLM(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(dtype=torch.bfloat16)  # type: ignore[call-arg]
    copy.config.dtype = "bfloat16"
    copy.generation_config = GenerationConfig(
        bos_token_id=model.config.bos_token_id,
        eos_token_id=model.config.eos_token_id,
        pad_token_id=model.config.pad_token_id,
        do_sample=False,
    )
    copy.save_pretrained(folder)
    save(tokenizer, folder)


def _loss(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, teacher: torch.Tensor | None
) -> torch.Tensor:
    if teacher is None:
        each = F.cross_entropy(logits.float(), labels, reduction="none")
    else:
        logs = F.log_softmax(logits.float(), dim=-1)
        each = F.kl_div(logs, F.log_softmax(teacher.float(), -1), reduction="none", log_target=True)
        each = each.sum(-1)
    return (each * weights).sum() / weights.sum()


class Trainer:
    """One model's training, resumable from its checkpoint."""

    def __init__(
        self,
        recipe: Recipe,
        tokenizer: Tokenizer,
        batches: Batches,
        checkpoint: Path,
        teacher: LlamaForCausalLM | None,
    ) -> None:
        self.recipe, self.batches = recipe, batches
        self.model = build(recipe, tokenizer)
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in self.model.named_parameters():
            is_matrix = parameter.ndim == 2 and "embed" not in name
            (matrices if is_matrix else rest).append(parameter)
        muon, adam = recipe.muon_lr, recipe.adam_lr
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=muon, weight_decay=0.01), muon),
            (torch.optim.AdamW(rest, lr=adam, betas=(0.9, 0.95), weight_decay=0.0), adam),
        ]
        self.step, self.elapsed, self.code_rows, self.tokens = 0, 0.0, 0, 0
        self.path = checkpoint
        self.teacher: Any = torch.compile(teacher.model, dynamic=False) if teacher else None
        self.teacher_head = teacher.lm_head if teacher else None
        self.body: Any = torch.compile(self.model.model, dynamic=False)
        self.loss = torch.compile(_loss, dynamic=False)
        if checkpoint.exists():
            state = torch.load(checkpoint, weights_only=True)
            self.model.load_state_dict(state["model"])
            for (optimizer, _), saved in zip(self.optimizers, state["optimizers"], strict=True):
                optimizer.load_state_dict(saved)
            self.step, self.elapsed, self.code_rows, self.tokens = state["counts"]
            print(f"resumed at step {self.step}", flush=True)

    def save_checkpoint(self) -> None:
        """Write the checkpoint and replace the old one atomically."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "counts": (self.step, self.elapsed, self.code_rows, self.tokens),
        }
        torch.save(state, self.path.with_suffix(".new"))
        self.path.with_suffix(".new").replace(self.path)

    def train_step(self, batch: Batch, progress: float) -> torch.Tensor:
        """Run a step; the loss covers only positions with a weight."""
        rate = min(1.0, (self.step + 1) / 40) * min(1.0, (1.0 - progress) / 0.5 + 0.01)
        for optimizer, lr in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
        flat = batch.weights.flatten()
        # A fixed number of places, to avoid recompilation.
        capacity = flat.numel() * 13 // 16 if flat.numel() == 24 * 256 else flat.numel()
        places = flat.nonzero().flatten()[:capacity]
        places = F.pad(places, (0, capacity - len(places)))
        weights = flat[places].clone()
        weights[int((flat > 0).sum()) :] = 0.0
        labels = batch.ids.flatten()[(places + 1).clamp(max=flat.numel() - 1)]
        inputs = {
            "input_ids": batch.ids,
            "attention_mask": batch.mask(),
            "position_ids": batch.positions,
            "use_cache": False,
        }
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guide = None
            if self.teacher is not None and self.teacher_head is not None:
                with torch.no_grad():
                    seen = self.teacher(**inputs).last_hidden_state.flatten(0, 1)[places]
                    guide = self.teacher_head(seen)
            hidden = self.body(**inputs).last_hidden_state.flatten(0, 1)[places]
            loss: torch.Tensor = self.loss(self.model.lm_head(hidden), labels, weights, guide)
        loss.backward()
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss.detach()

    def run(self) -> None:
        """Train for the recipe's steps or minutes, whichever ends first."""
        last, shown, saved = time.monotonic(), 0.0, self.elapsed
        while (
            progress := max(
                self.step / self.recipe.steps, self.elapsed / (60 * self.recipe.minutes)
            )
        ) < 1.0:
            mix = next(mix for until, mix in self.recipe.phases if progress < until)
            if self.recipe.long is not None and self.step % 16 == 15:
                mix = self.recipe.long
            # Long rows cover the code separately, at their own length.
            batch = self.batches.batch(self.step, mix, self.code_rows)
            self.code_rows += mix.code if mix is not self.recipe.long else 0
            value = float(self.train_step(batch, progress))
            shown = value if shown == 0.0 else 0.95 * shown + 0.05 * value
            self.step += 1
            self.tokens += batch.ids.numel()
            now = time.monotonic()
            self.elapsed += now - last
            if self.step % 20 == 0:
                print(
                    f"step {self.step} minutes {self.elapsed / 60:.1f} loss {shown:.4f} "
                    f"tokens {self.tokens}",
                    flush=True,
                )
            if self.elapsed - saved > CHECKPOINT_S:
                saved = self.elapsed
                self.save_checkpoint()
            last = time.monotonic()
        self.save_checkpoint()


@dataclass(frozen=True)
class TrainOptions:
    """The models to train, and where."""

    what: Annotated[Literal["target", "draft", "draft-bytes", "all"], Flag("Model to train.")] = (
        "all"
    )
    seed: Annotated[int, Flag("Random seed.")] = 1
    models: Annotated[Path, Flag("Folder to write the models to.")] = MODELS


def train(what: str, o: TrainOptions) -> None:
    recipe = RECIPES[what]
    texts = [*python_files(lambda path: not is_held_out(path)).values()]
    tokenizer = get_tokenizer(what, texts, o.seed, o.models)
    save(tokenizer, o.models / what)
    batches = Batches(tokenizer, o.seed, texts)
    print(f"{what}: {python_version()}, {batches.code_tokens} tokens of texts", flush=True)
    teacher = None
    if recipe.distilled:
        teacher = LlamaForCausalLM.from_pretrained(
            o.models / "target", dtype=torch.bfloat16, attn_implementation="eager"
        )
    torch.manual_seed(o.seed)
    trainer = Trainer(recipe, tokenizer, batches, CHECKPOINTS / f"{what}.pt", teacher)
    print(f"{what}: {trainer.model.num_parameters()} parameters", flush=True)
    trainer.run()
    save_model(trainer.model, tokenizer, o.models / what)
    print(f"{what}: saved after {trainer.step} steps, {trainer.tokens} tokens", flush=True)


@with_flags
def train_models(options: TrainOptions) -> None:
    """Train the bundled models from scratch: tokenizers, target, draft, and byte-level draft.

    All randomness depends on the seed. A recipe has so many steps; on slow machines its minutes end
    the schedule earlier, with the learning rate decaying accordingly.
    """
    for what in RECIPES if options.what == "all" else [options.what]:
        train(what, options)


if __name__ == "__main__":
    run(single(train_models))
