"""The bundled tokenizers: BPE of 4,096 tokens for target and draft, bytes for the other draft.

Both are byte-level, so they reproduce any text; digits are separate tokens. Encoding plain text
adds a BOS (like Llama's); the chat template includes its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from demo import corpus

MAX_LENGTH = 4096


def _finish(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.decoder = decoders.ByteLevel()
    bos = tokenizer.token_to_id(corpus.BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A",
        pair=f"{corpus.BOS} $A $B",
        special_tokens=[(corpus.BOS, bos)],
    )
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train BPE of so many tokens on the texts; special tokens have the ids 0 to 5."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _finish(tokenizer)


def build_bytes() -> Tokenizer:
    """Return a tokenizer with one token per byte, after the special tokens 0 to 5."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*corpus.SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(list(corpus.SPECIAL_TOKENS))
    return _finish(tokenizer)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=corpus.BOS,
        eos_token=corpus.EOS,
        pad_token=corpus.PAD,
        additional_special_tokens=[corpus.USER, corpus.ASSISTANT, corpus.END],
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
    fast.chat_template = corpus.CHAT_TEMPLATE
    folder.mkdir(parents=True, exist_ok=True)
    fast.save_pretrained(folder)
