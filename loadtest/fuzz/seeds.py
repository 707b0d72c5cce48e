"""Valid sessions, which set every field of every request somewhere: what mutations start from."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from flyspec.prefix import TokenSequence
from flyspec.rules import Rule, WindowScope
from flyspec.rules.presets import RULE_PRESETS
from flyspec.rules.resolve import resolve_rule
from flyspec.tokenizer import fingerprint
from flyspec.v1 import admin_pb2, draft_pb2, generation_pb2, verify_pb2

Session = Sequence[Message]
"""Messages of one call, in their order."""
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12] * 2
LENGTH = len(PROMPT)
SAMPLING = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {5: 1.0}, "min_tokens": 2,
}  # fmt: skip
TRACEPARENT = f"00-{'1' * 32}-{'2' * 16}-01"


@dataclass(frozen=True)
class Facts:
    """What is known of a server: limits, names, and `text`, which the model puts after `PROMPT`."""

    vocab_size: int
    context_length: int
    max_drafts: int
    drafters: Sequence[str]
    text: Sequence[int]
    draft_address: str = ""
    rules: Sequence[str] = tuple(RULE_PRESETS)
    heads: Sequence[str] = ()


def answered(message: Message) -> bool:
    """Whether a message of a stream is answered before the next one is sent.

    A staged round waits for a verdict, which may not come.
    """
    for field, value in message.ListFields():
        if field.name in ("round", "advance"):
            return field.name == "advance" or not value.HasField("staged_on")
    return False


def messages(cls: Any, *requests: dict[str, Any]) -> Session:
    """Messages of a class with these fields; dictionaries are messages in them."""
    return [cls(**request) for request in requests]


def _halves(*values: float) -> bytes:
    return struct.pack(f"<{len(values)}e", *values)


def _rules(facts: Facts) -> Iterator[tuple[int, dict[str, Any], Any]]:
    """Number, rule with all of its parameters, and preset of each rule that the server has."""
    for number, (name, preset) in enumerate(RULE_PRESETS.items()):
        if name not in facts.rules:
            continue
        own: dict[str, Any] = {"judge_threshold": 0.5} if preset.hidden_layers else {}
        resolved = resolve_rule(Rule(name, **own))
        rule = {k: v for k, v in asdict(resolved).items() if v is not None}
        yield number, {**rule, "guarded_token_ids": [] if preset.lossless else [9, 10]}, preset


def verify(facts: Facts) -> Iterator[Session]:
    """A session for each rule, and one at the end of the context."""
    yield [verify_pb2.VerifyServiceDescribeRequest(orchestrator_id="fuzz")]
    drafts = [*facts.text[:3], 9]
    for number, rule, preset in _rules(facts):
        opening = {
            "token_ids": PROMPT, "prompt_length": LENGTH - 2, "rule": rule, "seed": number,
            "other_rules": [{"name": "exact"}, {"name": "margin"}] if number % 2 else [],
            "orchestrator_id": "fuzz", "waited_ms": 1 if number == 1 else None,
            "sampling": SAMPLING if number % 3 else {}, "logprobs": 3 if number % 2 else None,
            "stop_token_ids": [11] if number % 2 else [],
        }  # fmt: skip
        pieces = []
        if preset.draft is not None:
            greedily = preset.draft.also_greedy and not opening["sampling"]
            size = facts.vocab_size if preset.draft.whole or greedily else 2
            given = [
                {"log_probs": _halves(*[-2.0] * size), "token_ids": [token, 8] * (size == 2)}
                for token in drafts
            ]
            pieces = [{"round_id": 1, "first_position": LENGTH + at,
                       "distributions": given[at : at + 2]} for at in (0, 2)]  # fmt: skip
        judged = {
            "round_id": 1, "keep_length": LENGTH, "draft_token_ids": drafts,
            "traceparent": TRACEPARENT, "draft_survivals": [0.9, 0.8, 0.5, 0.1],
            "remaining_loose_tokens": 5, "remaining_loose_cost_nats": 2.0,
            "exact_until_position": LENGTH + 1, "num_speculative_tokens": 2,
            "num_top_tokens": 3,
        }  # fmt: skip
        if number % 2:
            judged["rule_segments"] = [
                {"start_position": LENGTH - 1, "rule_index": 0, "remaining_loose_tokens": 3,
                 "remaining_loose_cost_nats": 1.0},
                {"start_position": LENGTH + 1, "rule_index": 1},
                {"start_position": LENGTH + 3, "rule_index": 2},
            ]  # fmt: skip
        if rule.get("window_scope") == WindowScope.ACROSS_ROUNDS:
            judged["num_speculative_tokens"] = 0
            judged["open_window"] = {
                "position": LENGTH - 1, "target_token_id": 9, "gap_nats": 0.1,
                "remaining_matches": 2, "target_logprobs": {
                    "logprob": -1.0, "top_token_ids": [9, 8], "top_logprobs": [-1.0, -2.0],
                    "token": b"i", "top_tokens": [b"i", b"h"],
                },
            }  # fmt: skip
        plain = {
            "round_id": 9, "keep_length": LENGTH - 1, "append_token_ids": [5, 6],
            "prefix_hash": TokenSequence([*PROMPT[:-1], 5, 6]).hash, "max_plain_tokens": 3,
            "return_plain_confidence": True,
        }  # fmt: skip
        forced = {
            "round_id": 10, "keep_length": LENGTH, "draft_token_ids": [5, 6],
            "teacher_forced": True,
        }  # fmt: skip
        scored = [{"round": forced}] if opening.get("logprobs") is not None else []
        staged = {
            "round_id": 2, "keep_length": LENGTH + 3, "draft_token_ids": [6, 7],
            "staged_on": {"round_id": 1, "keep_length": LENGTH + 2, "next_token_id": 9},
        }  # fmt: skip
        tree = {
            "round_id": 3, "keep_length": LENGTH, "draft_token_ids": drafts,
            "draft_parents": [0, 0, 1, 3], "num_top_tokens": 2,
        }  # fmt: skip
        trees = [] if preset.draft is not None else [{"round": tree}]
        yield messages(
            verify_pb2.VerifyRequest, {"open": opening}, *({"distributions": p} for p in pieces),
            {"round": judged}, {"round": staged}, *trees, {"round": plain}, *scored,
        )  # fmt: skip
    for name in facts.heads:
        head = {"name": name, "max_tokens": 5, "min_confidence": 0.1, "num_rounds": 3,
                "ignore_eos": True}  # fmt: skip
        yield messages(
            verify_pb2.VerifyRequest,
            {"open": {"token_ids": PROMPT, "prompt_length": 1, "rule": {"name": "exact"}}},
            {"round": {"round_id": 1, "keep_length": LENGTH, "max_plain_tokens": 2, "head": head}},
            {"round": {"round_id": 2, "keep_length": LENGTH - 2, "append_token_ids": [5, 6],
                       "draft_token_ids": drafts, "head": head}},
        )  # fmt: skip
    end = facts.context_length - 5
    yield messages(
        verify_pb2.VerifyRequest,
        {"open": {"token_ids": [5] * end, "prompt_length": 1, "rule": {"name": "fly"}}},
        {"round": {"round_id": 1, "keep_length": end, "draft_token_ids": [5] * 5}},
        {"round": {"round_id": 2, "keep_length": end, "max_plain_tokens": 5}},
    )


def draft(facts: Facts) -> Iterator[Session]:
    """Sessions with each drafter, one in another tokenizer's ids, and that tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    known, text = fingerprint(tokenizer), tokenizer.to_str().encode()
    about = {"fingerprint": known, "eos_token_ids": [256], "control_token_ids": [256],
             "vocab_size": 260}  # fmt: skip
    chunks = [{"tokenizer_json_chunk": chunk} for chunk in (text[:2000], text[2000:])]
    yield messages(draft_pb2.AddTokenizerRequest, {"facts": about}, *chunks)
    moves = [
        {"round_id": 1, "keep_length": LENGTH, "max_tokens": 4, "traceparent": TRACEPARENT},
        {"round_id": 2, "keep_length": LENGTH - 1, "append_token_ids": [5, 6, 7],
         "max_tokens": 8, "min_confidence": 0.2, "score": True,
         "top_tokens": [{"context_token_ids": [5, 6, 7], "token_ids": [7, 8, 9, 10]},
                        {"context_token_ids": [5, 6, 7], "token_ids": [7, 8], "parents": [0]}]},
        {"round_id": 3, "keep_length": LENGTH + 1, "max_tokens": 4, "max_tree_tokens": 6,
         "time_limit_ms": 50},
        {"round_id": 9, "keep_length": 1, "append_token_ids": [6, 7, 8]},
    ]  # fmt: skip
    for drafter in ("", *facts.drafters):
        for number, wanted in enumerate(({"top_k": 5, "draw_from_it": True}, {"raw": True}, None)):
            opening = {
                "token_ids": PROMPT, "seed": number, "drafter": drafter, "distribution": wanted,
                "prompt_length": LENGTH - 1, "sampling": SAMPLING if number else {},
                "tokenizer_fingerprint": "" if wanted else known, "sharing_scope": "fuzz",
            }  # fmt: skip
            yield messages(draft_pb2.DraftRequest, {"open": opening},
                           *({"advance": move} for move in moves))  # fmt: skip
    if "model" in facts.drafters:
        ahead = {"num_proposals": 3, "max_tokens": 4}
        yield messages(
            draft_pb2.DraftRequest, {"open": {"token_ids": PROMPT, "drafter": "model"}},
            {"advance": {"round_id": 1, "keep_length": LENGTH, "max_tokens": 4, "ahead": ahead}},
            {"advance": {"round_id": 2, "keep_length": LENGTH, "append_token_ids": [5, 6, 7],
                         "ahead": {**ahead, "num_unverified": 2, "unverified_ahead_id": 1}}},
            {"advance": {"round_id": 3, "keep_length": LENGTH, "max_tokens": 4}},
        )  # fmt: skip
    end = facts.context_length - 4
    yield messages(draft_pb2.DraftRequest, {"open": {"token_ids": [5] * end}},
                   {"advance": {"keep_length": end, "max_tokens": 8}})  # fmt: skip


def generation(facts: Facts) -> Iterator[Session]:
    """A request for each rule, with all forms of prompts."""
    turn = {"role": "user", "content": "How many are 3 apples?"}
    prompts: tuple[dict[str, Any], ...] = (
        {"text": "1, 2, 3, 4, é😀\n\0"}, {"token_ids": {"ids": [*PROMPT, *facts.text]}},
        {"chat": {
            "messages": [turn, {"role": "assistant", "content": "3", "fields_json": '{"a": [1]}'}],
            "tools_json": '[{"type": "function"}]', "documents_json": "[{}]",
            "template_kwargs_json": '{"enable_thinking": false}',
            "continue_final_message": True, "omit_generation_prompt": True,
        }},
    )  # fmt: skip
    for number, prompt in enumerate(prompts):
        yield messages(generation_pb2.ScoreRequest, {**prompt, "logprobs": 10 * number})
    drafters = ("", *facts.drafters)
    for number, rule, _ in _rules(facts):
        odd = number % 2 > 0
        predicted = {"prediction": "1, 2, 3"} if odd else {"prediction_token_ids": PROMPT}
        speculation = {
            "drafter": drafters[number % len(drafters)], "rule": rule, "max_loose_tokens": 9,
            "max_loose_cost_nats": 2.0, "exact_prefix_tokens": 1, "disable_loop_guard": True,
            "eager": odd, "adaptive": odd, "num_speculative_tokens": None if odd else 4,
            "num_draft_tokens_per_round": [2, 0, 3] if number % 4 == 3 else [],
            "exact_inside": ["tool_call", "json"] if number % 3 else [],
        }  # fmt: skip
        if odd:
            speculation["phases"] = [
                {"until": ["####", "a"], "max_loose_tokens": 3, "max_loose_cost_nats": 1.0},
                {"rule": {"name": "margin"}, "until_token_ids": [7]}, {"rule": {"name": "exact"}},
            ]  # fmt: skip
        yield messages(generation_pb2.GenerateRequest, {
            **prompts[number % 3], "max_tokens": 5, "ignore_eos": True, "seed": number,
            "stop": ["nowhere", "\n\n"], "sampling": SAMPLING if number % 4 else {},
            "logprobs": 3 if number % 3 else None, "return_rounds": odd, "speculation": speculation,
            "stop_token_ids": [3], "return_draft_distributions": odd, **predicted,
        })  # fmt: skip


def admin(facts: Facts) -> Iterator[Session]:
    """An operator's requests."""
    for name in ("fuzz-0", "fuzz-1", *facts.drafters):
        new = {"name": name, "address": facts.draft_address}
        yield [admin_pb2.RegisterDrafterRequest(**new)]
        yield [admin_pb2.RegisterDrafterRequest(**new, kind=facts.drafters[0])]
        yield [admin_pb2.ActivateDrafterRequest(name=name, share=0.6)]
        yield [admin_pb2.ActivateDrafterRequest(name=name)]
        yield [admin_pb2.DrainDrafterRequest(name=name, wait_ms=1)]
        yield [admin_pb2.RemoveDrafterRequest(name=name, force=True)]
    yield [admin_pb2.DrainRequest(resume=True)]


def of_every_server(service: str) -> Iterator[Session]:
    """Health and reflection of a server of this service."""
    yield [health_pb2.HealthCheckRequest(service=service)]
    extension = {"containing_type": "flyspec.v1.Rule", "extension_number": 1}
    yield messages(
        reflection_pb2.ServerReflectionRequest, {"list_services": "", "host": "x"},
        {"file_containing_symbol": "flyspec.v1.Rule"}, {"file_containing_extension": extension},
        {"file_by_filename": "flyspec/v1/common.proto"},
        {"all_extension_numbers_of_type": "flyspec.v1.Rule"},
    )  # fmt: skip
