"""Trains an EAGLE-3 head on the target's own distribution, by EAGLE-3's training-time test.

As arXiv 2503.01840 has it: the head is unrolled for several steps on its own features, and each
step is compared with the target. At step j the row at index t stands for position t + j: it
attends to the rows of the target's hidden states up to t, and to its own rows of steps 1 to j at
the same index. Tokens are those of the text, the loss is the cross-entropy with the target's
distribution over the tokens that the head can draft, at places where the target's own choice is
one of them (SpecForge's target mask); step j weighs 0.8^j, as there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flyspec.engine.draft_heads.eagle3_network import Eagle3Network, Eagle3Shape, rotary_angles
from flyspec.engine.draft_heads.target import HeadTarget
from flyspec_lab.local_model import LocalModel

STEP_DECAY = 0.8
ALONE_UNTIL = 0.5
"""Share of a new head's training in which it is not unrolled: at a fraction of the cost, it learns
most of what later steps need, too."""
_WARM_UP = 40
"""Steps over which the learning rate rises; over the second half it falls to nothing."""


class LearntText(NamedTuple):
    """Tokens of a text, of which the head learns to predict those from `first` on."""

    token_ids: list[int]
    first: int


@dataclass(frozen=True)
class HeadBatch:
    """Texts of similar lengths, padded to n tokens.

    `token_ids` [texts, n]; `aux` the target's rows at every token, one tensor
    [texts, n, hidden size] per layer, and `last` those after the final norm. `places` [texts, m]
    are the indices of the rows that predict a token to be learnt; `learnt` which of them are not
    padding. `size`: tokens that are not padding.
    """

    size: int
    token_ids: Tensor
    aux: tuple[Tensor, ...]
    last: Tensor
    places: Tensor
    learnt: Tensor


def frequent_tokens(texts: Sequence[LearntText], size: int, vocab_size: int) -> Tensor:
    """Return the `size` most frequent tokens to be predicted, in order of their ids: int64."""
    counts: Counter[int] = Counter()
    for text in texts:
        counts.update(text.token_ids[text.first :])
    ranked = [token for token, _ in counts.most_common()]
    seen = set(ranked)
    ranked += (token for token in range(vocab_size) if token not in seen)
    return torch.tensor(sorted(ranked[: min(size, vocab_size)]))


def batches(
    texts: Sequence[LearntText],
    model: LocalModel,
    layers: tuple[int, ...],
    tokens: int,
    generator: torch.Generator,
) -> Iterator[HeadBatch]:
    """Yield all texts in batches of about `tokens` tokens, in a random order."""
    order = torch.randperm(len(texts), generator=generator).tolist()
    # Sorted within large pieces of the order, so that batches have little padding but vary.
    piece = 2048
    groups: list[list[LearntText]] = []
    for at in range(0, len(order), piece):
        own = sorted((texts[i] for i in order[at : at + piece]), key=lambda t: len(t.token_ids))
        group: list[LearntText] = []
        for text in own:
            if group and (len(group) + 1) * len(text.token_ids) > tokens:
                groups.append(group)
                group = []
            group.append(text)
        groups.append(group)
    for i in torch.randperm(len(groups), generator=generator).tolist():
        yield _batch(groups[i], model, layers)


def _batch(texts: Sequence[LearntText], model: LocalModel, layers: tuple[int, ...]) -> HeadBatch:
    width = max(len(text.token_ids) for text in texts)
    token_ids = torch.zeros(len(texts), width, dtype=torch.int64)
    rows: list[Tensor] = []
    # A head's row at index t reads the token at t + 1 and predicts the one at t + 2.
    firsts = [max(0, text.first - 2) for text in texts]
    counts = [max(1, len(text.token_ids) - 2 - f) for text, f in zip(texts, firsts, strict=True)]
    span = torch.arange(max(counts))
    places = torch.tensor(firsts)[:, None] + span
    learnt = span < torch.tensor(counts)[:, None]
    ids = [text.token_ids for text in texts]
    read = model.rows(ids, [*map(len, ids)], (*layers, -1))
    for index, (own, of) in enumerate(zip(ids, read, strict=True)):
        token_ids[index, : len(own)] = torch.tensor(own)
        hidden = torch.stack([*of.hidden]).to("cpu", torch.bfloat16)
        rows.append(F.pad(hidden, (0, 0, 0, width - len(own))))
    stacked = torch.stack(rows, dim=1)
    size = sum(len(text.token_ids) for text in texts)
    return HeadBatch(
        size, token_ids, tuple(stacked[:-1]), stacked[-1], places.clamp(max=width - 1), learnt
    )


class HeadTrainer:
    """One head's training. The network is on the CPU in float32, its products in bf16.

    `step` and `tokens` count what it was trained on; `agreement` is how often each unrolled step
    has had the target's most likely token of late.
    """

    def __init__(
        self,
        shape: Eagle3Shape,
        target: HeadTarget,
        draft_token_ids: Tensor,
        *,
        ttt_steps: int,
        seed: int,
        muon_lr: float,
        adam_lr: float,
        length: int,
        alone_until: float = ALONE_UNTIL,
    ) -> None:
        torch.manual_seed(seed)
        self._alone_until = alone_until
        self.network = Eagle3Network(shape)
        self.draft_token_ids = draft_token_ids
        self.embedding = target.embedding.float()
        self._head = target.lm_head.to(torch.bfloat16)
        self._steps = ttt_steps
        self._angles = rotary_angles(shape.config, length + ttt_steps)
        self._index = torch.full((len(target.lm_head),), -1)
        self._index[draft_token_ids] = torch.arange(len(draft_token_ids))
        with torch.no_grad():
            for name, parameter in self.network.named_parameters():
                if parameter.ndim == 2:
                    torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
                    if name.endswith(("o_proj.weight", "down_proj.weight")):
                        parameter.mul_(0.1)
            if shape.config.hidden_size == target.lm_head.shape[1]:
                self.network.lm_head.weight.copy_(target.lm_head[draft_token_ids])
        # Muon for the matrices inside, as for the bundled models, AdamW for the rest.
        muon = getattr(torch.optim, "Muon", None)  # since torch 2.9
        inner: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in self.network.named_parameters():
            own = parameter.ndim == 2 and not name.startswith("lm_head") and muon
            (inner if own else rest).append(parameter)
        adam = torch.optim.AdamW(rest, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimizers = [adam, *([muon(inner, lr=muon_lr, weight_decay=0.01)] if muon else ())]
        self._rates = adam_lr, muon_lr
        self.step = self.tokens = 0
        self.agreement: tuple[float, ...] = ()

    def train_step(self, batch: HeadBatch, progress: float) -> None:
        """Run a step. `progress` from 0 to 1 decides the learning rate."""
        rate = min(1.0, (self.step + 1) / _WARM_UP) * min(1.0, (1.0 - progress) / 0.5 + 0.01)
        for optimizer, lr in zip(self._optimizers, self._rates, strict=False):
            for group in optimizer.param_groups:
                group["lr"] = lr * rate
        steps = 1 if progress < self._alone_until else self._steps
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss, right = self._unroll(batch, steps)
        loss.backward()
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        self.tokens += batch.size
        before = self.agreement if len(self.agreement) == len(right) else right
        self.agreement = tuple(0.95 * a + 0.05 * b for a, b in zip(before, right, strict=True))

    def _unroll(self, batch: HeadBatch, steps: int) -> tuple[Tensor, list[float]]:
        wanted, best = self._wanted(batch, steps)
        total = torch.zeros(())
        right: list[float] = []
        for j, (read, learnt) in enumerate(self.unrolled(batch, steps)):
            rows, columns = learnt.nonzero(as_tuple=True)
            own = rows, columns + j
            loss, share = self._compare(read[learnt], wanted[own], best[own])
            total = total + STEP_DECAY**j * loss
            right.append(share)
        return total, right

    def unrolled(self, batch: HeadBatch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield, for each step, the rows that the output layer reads, at the batch's places
        [texts, m, hidden size], and which of them are learnt [texts, m]."""
        network, count = self.network, batch.token_ids.shape[1]
        rows = torch.arange(len(batch.token_ids))[:, None]
        seen = torch.ones(count, count, dtype=torch.bool).tril()
        kept: list[tuple[Tensor, Tensor]] = []  # of each layer, at step 0
        later: list[list[tuple[Tensor, Tensor]]] = [[] for _ in network.layers]

        def whole(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.append((k, v))
            return _attention(q, k, v, seen[None], [])

        def gathered(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            later[i].append((k, v))
            return _attention(q, *kept[i], seen[batch.places], later[i])

        embedded = self.embedding[batch.token_ids]
        following = F.pad(embedded[:, 1:], (0, 0, 0, 1))
        angles = self._angles[0][:count], self._angles[1][:count]
        hidden = network.fuse([each.float() for each in batch.aux]).float()
        read, hidden = network.run(following, hidden, angles, whole)
        read, hidden = read[rows, batch.places], hidden[rows, batch.places]
        for j in range(steps):
            at = batch.places + j
            if j:
                angles = self._angles[0][at], self._angles[1][at]
                tokens = embedded[rows, (at + 1).clamp(max=count - 1)]
                read, hidden = network.run(tokens, hidden, angles, gathered)
            left = batch.learnt.sum(dim=1, keepdim=True) - j
            yield read, torch.arange(batch.places.shape[1]) < left

    @torch.no_grad()
    def _wanted(self, batch: HeadBatch, steps: int) -> tuple[Tensor, Tensor]:
        """Return the target's distribution over the tokens that can be drafted, and its choice.

        [texts, m + steps - 1, draft vocabulary] and [texts, m + steps - 1]: the head's row at index
        t predicts, at step j, the token at t + j + 2, and the target's row at t + j + 1 does.
        """
        rows = torch.arange(len(batch.token_ids))[:, None]
        reach = torch.arange(batch.places.shape[1] + steps - 1)
        places = (batch.places[:, :1] + 1 + reach).clamp(max=batch.token_ids.shape[1] - 1)
        logits = (batch.last[rows, places] @ self._head.T).float()
        return logits[..., self.draft_token_ids].softmax(dim=-1), logits.max(dim=-1).indices

    def _compare(self, read: Tensor, wanted: Tensor, best: Tensor) -> tuple[Tensor, float]:
        """Return the loss of a step's rows, and the share whose likeliest token is the target's."""
        logits = self.network.lm_head(read).float()
        draftable = self._index[best] >= 0
        each = -(wanted * logits.log_softmax(dim=-1)).sum(dim=-1)
        loss = (each * draftable).sum() / draftable.sum().clamp(min=1)
        chosen = self.draft_token_ids[logits.detach().max(dim=-1).indices]
        return loss, float((chosen == best).float().mean())


def _attention(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attend to the keys seen [.., rows, keys], and to the row's own ones of later steps.

    Queries are [texts, rows, heads, dim], keys and values [texts, keys, KV heads, dim].
    """
    dim, group = q.shape[-1], q.shape[-2] // k.shape[-2]
    q = q.unflatten(2, (-1, group))  # [texts, rows, KV heads, group, dim]
    scores = torch.einsum("bthgd,bshd->bhgts", q, k) / math.sqrt(dim)
    scores = scores.float().masked_fill(~seen[:, None, None], -math.inf)
    extra = [torch.einsum("bthgd,bthd->bhgt", q, key)[..., None] / math.sqrt(dim) for key, _ in own]
    shares = torch.cat([scores, *(each.float() for each in extra)], dim=-1).softmax(dim=-1)
    shares = shares.to(v.dtype)
    count = scores.shape[-1]
    found = torch.einsum("bhgts,bshd->bthgd", shares[..., :count], v)
    for i, (_, value) in enumerate(own):
        share = shares[..., count + i].permute(0, 3, 1, 2)[..., None]
        found = found + share * value[:, :, :, None]
    return found.flatten(2)
