"""A target's tokenizer as the orchestrator gets it, from transformers' objects. No torch."""

from __future__ import annotations

import json
from typing import Any

from flyspec.chat_template import DEFAULT
from flyspec.errors import ConfigError
from flyspec.model_files import model_source
from flyspec.tokenizer import fingerprint
from flyspec.values.admin import TokenizerBundle


def load_bundle(name: str, config: Any) -> TokenizerBundle:
    """Return a model's tokenizer without its weights, given its configuration.

    Raises `ConfigError`.
    """
    from transformers import AutoTokenizer, GenerationConfig

    from flyspec.engine.configuration import unreadable

    source = model_source(name)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        try:
            generation_config = GenerationConfig.from_pretrained(source)
        except OSError:  # there is none
            generation_config = GenerationConfig.from_model_config(config)
    except Exception as error:
        raise unreadable(name, error) from error
    return tokenizer_bundle(tokenizer, generation_config)


def tokenizer_bundle(tokenizer: Any, generation_config: Any) -> TokenizerBundle:
    """Collect what encodes, decodes and ends a sequence from transformers' objects."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ConfigError("the model has no fast tokenizer (tokenizer.json); convert it first")
    _check_ids(backend.get_vocab(False))
    eos = generation_config.eos_token_id
    if eos is None:
        eos = tokenizer.eos_token_id
    eos_ids = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    control = {*eos_ids, *tokenizer.all_special_ids}
    control |= {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    pad = tokenizer.pad_token_id
    templates = tokenizer.chat_template or {}
    if isinstance(templates, str):
        templates = {DEFAULT: templates}
    return TokenizerBundle(
        tokenizer_json=backend.to_str().encode(),
        fingerprint=fingerprint(backend, None if pad in eos_ids else pad),
        eos_token_ids=tuple(sorted(eos_ids)),
        control_token_ids=tuple(sorted(control)),
        bos_token_id=tokenizer.bos_token_id,
        chat_template=templates.get(DEFAULT, ""),
        generation_config_json=json.dumps(generation_config.to_diff_dict()),
        named_chat_templates=tuple(sorted((n, t) for n, t in templates.items() if n != DEFAULT)),
        special_tokens=tuple(sorted(tokenizer.special_tokens_map.items())),
    )


def _check_ids(vocabulary: dict[str, int]) -> None:
    """Reject a vocabulary with an id for two tokens: written out again, it lacks one of them."""
    tokens = {token_id: token for token, token_id in vocabulary.items()}
    for token, token_id in vocabulary.items() if len(tokens) < len(vocabulary) else ():
        if (other := tokens[token_id]) != token:
            raise ConfigError(
                f"the model's tokenizer.json gives id {token_id} to both {token!r} and {other!r}; "
                "each token needs an id of its own: get the file again"
            )
