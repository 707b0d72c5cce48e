"""Valid sessions of every method: what the changes start from."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tokenizers import Tokenizer

from flyspec.bundled import DRAFT_BYTES
from flyspec.rules import Rule
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.tokenizer import fingerprint
from flyspec.v1 import admin_pb2, draft_pb2, generation_pb2, verify_pb2

Session = Sequence[Message]
"""Messages of one call, in their order."""
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 2
LENGTH, COUNT = len(PROMPT), 8
FILES: dict[str, FileDescriptor] = {
    "draft": draft_pb2.DESCRIPTOR, "verify": verify_pb2.DESCRIPTOR,
    "generation": generation_pb2.DESCRIPTOR, "admin": admin_pb2.DESCRIPTOR,
}  # fmt: skip
"""The methods of each server."""


SMALL: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "draft_dtype": "float32", "threads": 1, "draft_threads": 1,
    "log_level": "warning",
}  # fmt: skip
"""Options of the stacks that are attacked."""


@dataclass(frozen=True)
class Facts:
    """Facts of a server: limits, names, and `text`, which the model puts after `PROMPT`."""

    vocab_size: int
    context_length: int
    max_drafts: int
    drafters: Sequence[str]
    text: Sequence[int]
    draft_address: str = ""
    rules: Sequence[str] = tuple(RULE_PRESETS)
    heads: Sequence[str] = ()


def canary(name: str) -> Session:
    """Return a session whose tokens are always the same: a proposal, verdicts or a text."""
    opening = {"token_ids": PROMPT, "sampling": {"min_tokens": 99}, "seed": 1}
    if name == "draft":
        advance = {"keep_length": LENGTH, "max_tokens": COUNT}
        return _of(draft_pb2.DraftRequest, {"open": opening}, {"advance": advance})
    exact = {"rule": {"name": "exact"}}
    if name == "verify":
        return _of(
            verify_pb2.VerifyRequest,
            {"open": {**opening, **exact, "prompt_length": LENGTH}},
            {"round": {"keep_length": LENGTH, "draft_token_ids": PROMPT}},
            {"round": {"round_id": 1, "keep_length": LENGTH, "max_plain_tokens": COUNT}},
        )
    return _of(generation_pb2.GenerateRequest, {
        "token_ids": {"ids": PROMPT}, "max_tokens": COUNT, "seed": 1, "ignore_eos": True,
        "speculation": exact,
    })  # fmt: skip


def sessions(name: str, facts: Facts) -> Iterator[Session]:
    """Yield valid sessions of a server: its own, then health and reflection."""
    yield from {"draft": _draft, "verify": _verify, "generation": _generation, "admin": _admin}[
        name
    ](facts)
    (service,) = FILES[name].services_by_name.values()
    yield [health_pb2.HealthCheckRequest(service=service.full_name)]
    yield _of(
        reflection_pb2.ServerReflectionRequest, {"list_services": "", "host": "x"},
        {"file_containing_symbol": "flyspec.v1.Rule"},
    )  # fmt: skip


def _of(cls: Any, *requests: dict[str, Any]) -> Session:
    return [cls(**request) for request in requests]


def _rules(facts: Facts) -> Iterator[tuple[dict[str, Any], Any]]:
    """Yield each rule that the server has, with all of its parameters, and its preset."""
    for name, preset in RULE_PRESETS.items():
        if name in facts.rules:
            own: dict[str, Any] = {"judge_threshold": 0.5} if preset.hidden_layers else {}
            resolved = asdict(resolve_rule(Rule(name, **own)))
            yield {k: v for k, v in resolved.items() if v is not None}, preset


def _verify(facts: Facts) -> Iterator[Session]:
    drafts = [*facts.text[:3], 9]
    for rule, preset in _rules(facts):
        pieces = []
        if preset.draft is not None:
            size = facts.vocab_size if preset.draft.whole or preset.draft.also_greedy else 2
            given = [
                {"log_probs": struct.pack(f"<{size}e", *[-2.0] * size),
                 "token_ids": [token, 8] * (size == 2)}
                for token in drafts
            ]  # fmt: skip
            piece = {"round_id": 1, "first_position": LENGTH, "distributions": given}
            pieces = [{"distributions": piece}]
        yield _of(
            verify_pb2.VerifyRequest,
            {"open": {"token_ids": PROMPT, "prompt_length": LENGTH - 2, "rule": rule}},
            *pieces,
            {"round": {"round_id": 1, "keep_length": LENGTH, "draft_token_ids": drafts}},
            {"round": {"round_id": 9, "keep_length": LENGTH - 1, "append_token_ids": [5, 6],
                       "max_plain_tokens": 3}},
        )  # fmt: skip

    opening = {"token_ids": PROMPT, "prompt_length": 1, "rule": {"name": "exact"}}
    for name in facts.heads:
        head = {"name": name, "max_tokens": 5}
        yield _of(
            verify_pb2.VerifyRequest, {"open": opening},
            {"round": {"round_id": 1, "keep_length": LENGTH, "max_plain_tokens": 2, "head": head}},
            {"round": {"round_id": 2, "keep_length": LENGTH - 2, "append_token_ids": [5, 6],
                       "draft_token_ids": drafts, "head": head}},
        )  # fmt: skip


def _draft(facts: Facts) -> Iterator[Session]:
    tokenizer = Tokenizer.from_file(str(DRAFT_BYTES / "tokenizer.json"))
    control = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    about = {"fingerprint": fingerprint(tokenizer), "vocab_size": tokenizer.get_vocab_size(),
             "eos_token_ids": control[:1], "control_token_ids": control}  # fmt: skip
    chunk = {"tokenizer_json_chunk": tokenizer.to_str().encode()}
    yield _of(draft_pb2.AddTokenizerRequest, {"facts": about}, chunk)
    for drafter in ("", *facts.drafters):
        yield _of(
            draft_pb2.DraftRequest, {"open": {"token_ids": PROMPT, "drafter": drafter}},
            {"advance": {"round_id": 1, "keep_length": LENGTH, "max_tokens": 4}},
            {"advance": {"round_id": 2, "keep_length": LENGTH - 1, "append_token_ids": [5, 6, 7],
                         "max_tokens": 8}},
        )  # fmt: skip


def _generation(facts: Facts) -> Iterator[Session]:
    prompts: tuple[dict[str, Any], ...] = (
        {"text": "1, 2, 3, 4, é😀\n\0"}, {"token_ids": {"ids": PROMPT}},
        {"chat": {"messages": [{"role": "user", "content": "How many are 3 apples?"}]}},
    )  # fmt: skip
    for prompt in prompts:
        yield _of(generation_pb2.ScoreRequest, prompt)
    for number, (rule, _) in enumerate(_rules(facts)):
        yield _of(generation_pb2.GenerateRequest, {
            **prompts[number % 3], "max_tokens": 5, "ignore_eos": True,
            "speculation": {"rule": rule, "num_speculative_tokens": 4},
        })  # fmt: skip


def _admin(facts: Facts) -> Iterator[Session]:
    for name in ("fuzz-0", *facts.drafters):
        yield [admin_pb2.RegisterDrafterRequest(name=name, address=facts.draft_address)]
        yield [admin_pb2.ActivateDrafterRequest(name=name, share=0.6)]
        yield [admin_pb2.DrainDrafterRequest(name=name, wait_ms=1)]
        yield [admin_pb2.RemoveDrafterRequest(name=name, force=True)]
    yield [admin_pb2.DrainRequest(resume=True)]
