"""Honest recordings of many kinds, forged ones, and a target quantised to 8 bits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flyspec.bundled import TARGET
from flyspec.client import AsyncClient
from flyspec.client.recordings import RecordedLine, recordable, recording_of
from flyspec.rules import Divergence, Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.chat import Chat
from flyspec.values.generation import Recording
from flyspec.values.requests import GenerateOptions
from flyspec.values.rounds import Outcome
from flyspec.values.tokens import SamplingParams
from flyspec_lab.word_problems import problems

ACROSS = WindowScope.ACROSS_ROUNDS
RULES = [
    *(Rule(name) for name, preset in RULE_PRESETS.items() if not preset.hidden_layers),
    Rule("fly", window_scope=ACROSS, fly_window_size=3),
    Rule("fly", fly_window_size=0),
    Rule("margin", margin_threshold=2.0),
    Rule("fuzzy", divergence=Divergence.TV, divergence_threshold=0.6, divergence_top_k=0),
]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9, repetition_penalty=1.1, presence_penalty=0.2),
    SamplingParams(min_tokens=40, logit_bias=((19, 1.5),)),
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"max_loose_tokens": 2},
    {"drafter": "prompt_lookup", "max_loose_cost_nats": 1.0},
    {"exact_prefix_tokens": 9, "eager": True},
    {"drafter": "multi_level", "ignore_eos": True},
    {"prediction": "Together, it is 12 + 30 = 42.\n#### 42", "num_speculative_tokens": None},
    {"num_speculative_tokens": "auto"},
    {"stop": ["####"], "num_speculative_tokens": 4},
    {"stop_token_ids": [19], "num_speculative_tokens": 15},
    {"num_speculative_tokens": 0},
]


def mixed_options(number: int, max_tokens: int = 96) -> GenerateOptions:
    """Return the options of one of many different requests."""
    extra = {"num_speculative_tokens": 6, **EXTRAS[number % len(EXTRAS)]}
    return GenerateOptions(
        sampling=SAMPLINGS[number % len(SAMPLINGS)],
        rule=RULES[number % len(RULES)],
        seed=1000 + number,
        max_tokens=max_tokens,
        **extra,
    )


async def record(
    client: AsyncClient, options: Sequence[GenerateOptions], problem_seed: int = 5, at_once: int = 6
) -> list[RecordedLine]:
    """Record a word problem's answer for each of these options."""
    gate = asyncio.Semaphore(at_once)
    asked = problems(problem_seed, len(options))

    async def one(number: int) -> RecordedLine:
        async with gate:
            prompt = Chat.of_user(asked[number].question)
            generation = await client.complete(prompt, recordable(options[number]))
            return RecordedLine(f"generation {number}", recording_of(generation))

    return await asyncio.gather(*map(one, range(len(options))))


def forged(line: RecordedLine, forge: Callable[[Recording], Recording]) -> RecordedLine:
    return line._replace(recording=forge(line.recording))


def claiming(line: RecordedLine, **started: Any) -> RecordedLine:
    """Return a recording that claims something else of what was asked for."""
    return forged(line, lambda r: replace(r, started=replace(r.started, **started)))


def with_token(line: RecordedLine, index: int, token: int, rounds_too: bool) -> RecordedLine:
    """Return a recording with another token at an output index; `rounds_too`: a careful forger's,
    whose rounds have it as well. Tokens after it stay."""

    def forge(recording: Recording) -> Recording:
        ids = list(recording.output.token_ids)
        ids[index] = token
        changed = replace(recording, output=replace(recording.output, token_ids=ids))
        if not rounds_too:
            return changed
        position = len(recording.started.prompt_token_ids) + index
        return replace(changed, rounds=[_put(r, position, token) for r in recording.rounds])

    return forged(line, forge)


def _put(record: Any, position: int, token: int) -> Any:
    """Put a token in a round, if the round has given the token at that position."""
    index = position - record.start_length
    if position == record.keep_length:
        decisions = [
            d._replace(target_token_id=token) if d.outcome is Outcome.REJECTED else d
            for d in record.decisions
        ]
        return replace(record, next_token_id=token, decisions=decisions)
    if 0 <= index < record.keep_length - record.start_length:
        if record.draft_token_ids:
            drafts = [*record.draft_token_ids]
            drafts[index] = token
            return replace(record, draft_token_ids=drafts)
        plain = [*record.plain_token_ids]
        plain[index] = token
        return replace(record, plain_token_ids=plain)
    return record


def quantised(folder: Path, bits: int = 8) -> Path:
    """Write the bundled target with the weights of its linear layers rounded to so many bits.

    Absmax per row, symmetric, and dequantised, as LLM.int8's vector-wise scheme rounds weights
    (arXiv 2208.07339, section 2). Embeddings, tied to the output layer, stay.
    """
    model = AutoModelForCausalLM.from_pretrained(TARGET)
    most = 2 ** (bits - 1) - 1
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                weight = module.weight.float()
                scale = weight.abs().amax(dim=1, keepdim=True) / most
                rounded = (weight / scale).round().clamp(-most, most) * scale
                module.weight.copy_(rounded.to(module.weight.dtype))
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TARGET).save_pretrained(folder)
    return folder
