"""A trial of the installed llama.cpp in a process of its own: some rows by quantised matrices.

A llama.cpp built for another processor, or miscompiled, ends its process with a signal in the first
such product, after minutes of reading weights. `flyspec.preflight.gguf` runs this module to see
whether it does: on a model of one layer of zeros.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

WIDTH, ROWS = 256, 32
"""Columns of a matrix that every quantisation and AMX accept; more rows than a single token."""


def write_model(path: Path) -> None:
    """Write a GGUF file of a Llama with one layer, whose matrices are zeros in Q8_0."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    writer = GGUFWriter(path, "llama")
    writer.add_vocab_size(WIDTH)
    writer.add_tokenizer_model("none")
    writer.add_context_length(WIDTH)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(WIDTH)
    writer.add_block_count(1)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    kind = GGMLQuantizationType.Q8_0
    matrix = quants.quantize(np.zeros((WIDTH, WIDTH), np.float32), kind)
    layer = "attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down"
    for name in "token_embd", *(f"blk.0.{part}" for part in layer.split()):
        writer.add_tensor(f"{name}.weight", matrix, raw_dtype=kind)
    for name in "output_norm", "blk.0.attn_norm", "blk.0.ffn_norm":
        writer.add_tensor(f"{name}.weight", np.ones(WIDTH, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    from flyspec.engine.llama_cpp.binding import Context, ContextPlan, GgufModel

    with TemporaryDirectory(prefix="flyspec-probe-") as folder:
        path = Path(folder) / "probe.gguf"
        write_model(path)
        context = Context(GgufModel(path, 0), ContextPlan(1, ROWS, ROWS, 1, float32=False))
        context.decode([0] * ROWS, range(ROWS), [0] * ROWS, [ROWS - 1])


if __name__ == "__main__":
    main()
