"""Heads restated from their definitions: no cache, one row at a time, nothing shared."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Next = Callable[[Sequence[Tensor], Sequence[int]], Tensor]
"""Logits over the target's vocabulary after hidden rows [n, hidden] of each layer and the tokens
that follow them, of which there may be more than rows: those were drafted."""


def rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x, position, theta):
    """Rotary embedding of a head [dim], by halves."""
    half = len(x) // 2
    out = x.clone()
    for i in range(half):
        # transformers computes the angles in float32.
        angle = torch.tensor(float(position)) * (
            1.0 / theta ** (2 * torch.tensor(float(i)) / len(x))
        )
        c, s = angle.cos().double(), angle.sin().double()
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return out


def attended(q, keys, values):
    """One row's attention: q [heads, dim], keys and values [KV heads, dim] for each position."""
    group = len(q) // len(keys[0])
    out = []
    for h, query in enumerate(q):
        scores = torch.stack([query @ k[h // group] for k in keys]) / len(query) ** 0.5
        shares = scores.softmax(-1)
        out.append(sum(w * v[h // group] for w, v in zip(shares, values, strict=True)))
    return torch.cat(out)


def eagle3(config, tensors, embedding):
    """An EAGLE-3 head of either layout (arXiv 2503.01840, section 3.1), without biases."""
    layer = config.get("transformer_layer_config", config)
    names = {
        n.replace("layers.0.", "midlayer.").removeprefix("model."): t for n, t in tensors.items()
    }
    t = {n.removeprefix("midlayer.").removesuffix(".weight"): x for n, x in names.items()}
    eps, dim = layer["rms_norm_eps"], layer["head_dim"]
    embedding = t.get("embed_tokens", embedding).double()

    def logits(hidden, tokens):
        keys = []
        values = []
        feature = row = torch.zeros(0)
        for p, token in enumerate(tokens):
            if p < len(hidden[0]):
                parts = [each[p].double() for each in hidden]
                if config.get("fc_norm"):
                    parts = [rms(x, t[f"fc_norm.{i}"], eps) for i, x in enumerate(parts)]
                joined = torch.cat(parts)
                if config.get("norm_before_fc"):
                    joined = rms(joined, t["input_norm"], eps)
                feature = t["fc"] @ joined
            normed = rms(feature, t["hidden_norm"], eps)
            read = torch.cat([rms(embedding[token], t["input_layernorm"], eps), normed])
            q, k, v = ((t[f"self_attn.{n}_proj"] @ read).view(-1, dim) for n in ("q", "k", "v"))
            if layer["model_type"] == "qwen3":
                q, k = (rms(x, t[f"self_attn.{n}_norm"], eps) for x, n in ((q, "q"), (k, "k")))
            q, k = (torch.stack([turned(head, p, 10_000.0) for head in x]) for x in (q, k))
            keys.append(k)
            values.append(v)
            residual = normed if config.get("norm_before_residual") else feature
            residual = residual + t["self_attn.o_proj"] @ attended(q, keys, values)
            x = rms(residual, t["post_attention_layernorm"], eps)
            gate, up = t["mlp.gate_proj"] @ x, t["mlp.up_proj"] @ x
            residual = residual + t["mlp.down_proj"] @ (gate * gate.sigmoid() * up)
            row = rms(residual, t["norm"], eps)
            feature = row if config.get("norm_output") else residual
        found = torch.full((len(embedding),), -torch.inf, dtype=torch.float64)
        for i, value in enumerate(t["lm_head"] @ row):
            found[i + t["d2t"][i]] = value
        return found

    return logits


def medusa(tensors, blocks):
    """FasterDecoding's Medusa heads (arXiv 2401.10774, section 2.1.1)."""

    def logits(hidden, tokens):
        k = len(tokens) - len(hidden[0])
        x = hidden[0][-1].double()
        for i in range(blocks):
            y = tensors[f"{k}.{i}.linear.weight"] @ x + tensors[f"{k}.{i}.linear.bias"]
            x = x + y * y.sigmoid()
        return tensors[f"{k}.{blocks}.weight"] @ x

    return logits


def mtp(alone, norm_output, target):
    """An MTP layer (arXiv 2412.19437, section 2.2) by transformers' own attention, without cache.

    `alone` is as `layouts.write_mtp` returns it.
    """
    alone.set_attn_implementation("eager")
    alone.set_experts_implementation("eager")

    @torch.inference_mode()
    def logits(hidden, tokens):
        known = hidden[0].double()
        found = known
        for count in range(len(known), len(tokens) + 1):
            joined = torch.cat(
                [alone.enorm(target.embedding[list(tokens[:count])]), alone.hnorm(known)], dim=-1
            )
            rows = (joined @ alone.eh_proj.weight.T)[None]
            places = torch.arange(count)[None]
            mask = torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)[None, None]
            out = alone.layers[0](
                rows,
                position_embeddings=alone.rotary_emb(rows, places),
                attention_mask=mask,
                position_ids=places,
            )
            out = (out[0] if isinstance(out, tuple) else out)[0]
            found = alone.norm(out)
            known = torch.cat([known, (found if norm_output else out)[-1:]])
        return target.lm_head @ found[-1]

    return logits
