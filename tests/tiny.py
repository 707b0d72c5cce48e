"""Tiny random models with a tokenizer, in Hugging Face format, for tests that need no real text."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

TEXT = (
    "The cat sat on the mat, and the dog sat on the log while the cat saw the dog run. "
    "Żółć, naïve café, 数学, 😀😃 and 👩‍👩‍👧 are text as well. "
    "def total(values):\n    result = 0\n    for value in values:\n        result += value\n"
)
VOCAB_SIZE = 400
CONTEXT_LENGTH = 256
HIDDEN_SIZE = 48


def make_tokenizer(text: str = TEXT) -> PreTrainedTokenizerFast:
    """Byte-level BPE with <s> (0), </s> (1), <pad> (2); prepends <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>", "<pad>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator([text] * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def make_model(
    directory: Path,
    seed: int = 0,
    hidden_size: int = HIDDEN_SIZE,
    text: str = TEXT,
    kind: str = "llama",
    num_attention_heads: int = 4,
) -> Path:
    """Save a random two-layer model with `make_tokenizer(text)` to `directory`.

    `kind` is transformers' `model_type`. It has two KV heads.
    """
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):  # zeros
            torch.nn.init.normal_(parameter, std=config.initializer_range)
    model.save_pretrained(directory)
    tokenizer = make_tokenizer(text)
    tokenizer.chat_template = (
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory
