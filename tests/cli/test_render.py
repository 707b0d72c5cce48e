"""The JSON document, colours and summary of a generation."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import replace

import pytest

from flyspec.cli import render
from flyspec.cli.json_output import to_json
from flyspec.client import (
    Chunk,
    Completion,
    Generation,
    GenerationTimings,
    SpeculationMetrics,
    Started,
)
from flyspec.rules import Rule
from flyspec.tables import rate
from flyspec.values.generation import FinishReason
from flyspec.values.phases import Phase
from flyspec.values.tokens import Origin, TokenLogprobs

METRICS = SpeculationMetrics(
    num_spec_steps=2, num_draft_tokens=8, num_accepted_draft_tokens=3, num_loose_tokens=1,
    loose_cost_nats=0.5, acceptance_histogram=[0, 1, 1], num_rounds=2, num_rejected_tokens=2,
    rejected_cost_nats=6.5, num_plain_tokens=6, num_staging_rounds=2, saved_ns=-7,
)  # fmt: skip


def generation(metrics: SpeculationMetrics = METRICS) -> Generation:
    chunks = [
        Chunk("Hi ", [5, 6], [Origin.EXACT_MODEL, Origin.LOOSE], ["Hi", " "], 2, [0.5]),
        Chunk("é\n", [7, 8, 9], [Origin.CORRECTION, Origin.BONUS, Origin.PLAIN], ["", "é", "\n"]),
    ]
    started = Started("id", "target", "model", 7, [1, 2], Rule("fly"), 4)
    timings = GenerationTimings()
    return Generation(started, chunks, Completion(FinishReason.STOP, None, 2, 5, metrics, timings))


def test_document_has_the_names_that_users_rely_on() -> None:
    document = json.loads(json.dumps(render.document(generation())))
    assert document == {
        "prompt_index": 0,
        "text": "Hi é\n",
        "token_ids": [5, 6, 7, 8, 9],
        "prompt_token_ids": [1, 2],
        "finish_reason": "stop",
        "stop_reason": None,
        "model": "target",
        "drafter": "model",
        "rule": {"name": "fly"},
        "phases": [],
        "exact_inside": [],
        "num_speculative_tokens": 4,
        "seed": 7,
        "usage": {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7},
        "timings": dataclasses.asdict(GenerationTimings()),
        "origins": ["EXACT_MODEL", "LOOSE", "CORRECTION", "BONUS", "PLAIN"],
        "loose_gaps_nats": [0.5],
        "loop_guard_token_index": None,
        "warnings": [],
        "drafters": [],
        "num_draft_tokens_per_round": [],
        "mixed_numerics": False,
        "num_recoveries": 0,
        "recoveries": [],
        "metrics": {"speculative_decoding": METRICS.document()},
    }


def test_metrics_have_the_names_that_users_rely_on() -> None:
    document = METRICS.document()
    derived = {"mean_acceptance_length": 2.5, "draft_acceptance_rate": 0.375}
    known = {**dataclasses.asdict(METRICS), **derived}
    assert document == {name: known[name] for name in document}
    assert set(document) == {
        *derived, "num_spec_steps", "num_draft_tokens", "num_accepted_draft_tokens",
        "num_loose_tokens", "loose_cost_nats", "num_rollbacks", "num_rejected_tokens",
        "rejected_cost_nats", "round_bytes", "distribution_bytes", "acceptance_histogram",
        "num_plain_tokens", "num_plain_bursts", "num_drafter_stops", "num_scored_tokens",
        "num_agreed_tokens", "saved_ns", "num_staging_rounds", "num_staged_hits",
        "num_unrepeated_rounds",
    }  # fmt: skip


def test_log_probabilities_are_a_list_as_openai_has_it() -> None:
    whole = generation()
    top = (b"\xe2\x82", b" cat")
    logprobs = [
        TokenLogprobs(-0.5 * i, (i, 8), (-0.25, -math.inf), b"t%d" % i, top) for i in range(5)
    ]
    chunks = [
        replace(whole.chunks[0], logprobs=logprobs[:2]),
        replace(whole.chunks[1], logprobs=logprobs[2:], token_texts=()),
    ]
    document = json.loads(json.dumps(render.document(replace(whole, chunks=chunks))))
    assert [entry["token"] for entry in document["logprobs"]] == ["t0", "t1", "t2", "t3", "t4"]
    assert [entry["token_id"] for entry in document["logprobs"]] == [5, 6, 7, 8, 9]
    assert document["logprobs"][1] == {
        "token": "t1",
        "token_id": 6,
        "bytes": [116, 49],
        "logprob": -0.5,
        "top_logprobs": [
            {"token": "\ufffd", "token_id": 1, "bytes": [0xE2, 0x82], "logprob": -0.25},
            {"token": " cat", "token_id": 8, "bytes": [*b" cat"], "logprob": -9999.0},
        ],
    }


def test_json_has_null_for_what_is_not_a_number() -> None:
    whole = generation(replace(METRICS, rejected_cost_nats=math.inf))
    chunks = [replace(whole.chunks[0], loose_gaps_nats=[math.nan]), *whole.chunks[1:]]
    text = to_json(render.document(replace(whole, chunks=chunks)))
    document = json.loads(text, parse_constant=pytest.fail)
    assert document["loose_gaps_nats"] == [None]
    assert document["metrics"]["speculative_decoding"]["rejected_cost_nats"] is None
    assert to_json({"a": (1, True, "Infinity", -math.inf)}) == '{"a": [1, true, "Infinity", null]}'


def test_what_happened_is_in_the_summary() -> None:
    whole = generation(replace(METRICS, num_rollbacks=3))
    completion = replace(whole.completion, loop_guard_token_index=40)
    line = render.summary(replace(whole, completion=completion), 1.0)
    assert "3 rollbacks" in line
    assert "repeating, exact from token 40 on" in line
    assert "rollback" not in render.summary(generation(), 1.0)
    assert "1 rollback " in render.summary(generation(replace(METRICS, num_rollbacks=1)), 1.0)


def test_phases_are_told_with_what_ends_them() -> None:
    phases = (
        Phase(Rule("fly"), ("</think>",), (7,), max_loose_tokens=3),
        Phase(Rule("exact"), max_loose_cost_nats=0.5),
    )
    whole = generation()
    started = replace(whole.started, phases=phases, exact_inside=("json",))
    phased = replace(whole, started=started)
    line = render.summary(phased, 1.0)
    assert "rule fly until '</think>' or token 7, then exact, exact inside json ·" in line
    assert render.document(phased)["phases"] == [
        {"rule": {"name": "fly"}, "until": ("</think>",), "until_token_ids": (7,),
         "max_loose_tokens": 3, "max_loose_cost_nats": None},
        {"rule": {"name": "exact"}, "until": (), "until_token_ids": (),
         "max_loose_tokens": None, "max_loose_cost_nats": 0.5},
    ]  # fmt: skip


def test_plain_decoding_has_numbers_too() -> None:
    metrics = SpeculationMetrics(num_rounds=5).document()
    assert metrics["mean_acceptance_length"] == 1.0
    assert metrics["draft_acceptance_rate"] == 0.0
    plain = generation(SpeculationMetrics(num_rounds=5))
    for k, adaptive, said in (
        (0, False, "no speculation"),
        (4, False, "no drafts ·"),
        (64, True, "no drafts: they promised no gain"),
    ):
        started = replace(plain.started, num_speculative_tokens=k, adaptive=adaptive)
        assert said in render.summary(replace(plain, started=started), 1.0)


def test_summary() -> None:
    line = render.summary(generation(), 0.5)
    for part in (
        "5 tokens",
        "10.0 tokens/s",
        "2.50 tokens per step",
        "loose 20.0% (0.50 nats)",
        "stop",
    ):
        assert part in line
    assert "\n" not in line
    assert "2 prompts · 10 tokens" in render.total([generation(), generation()], 1.0)


def test_every_token_has_the_colour_of_its_origin() -> None:
    first, second = generation().chunks
    assert render.pieces(first) == [
        ("Hi", render.STYLES[Origin.EXACT_MODEL]),
        (" ", render.STYLES[Origin.LOOSE]),
    ]
    assert [style for _, style in render.pieces(second)] == [
        render.STYLES[Origin.BONUS],
        render.STYLES[Origin.PLAIN],
    ]
    assert "\x1b[32mHi\x1b[0m" in render.painted(first, color=True)
    assert render.painted(first, color=False) == "Hi "


def test_styles_tell_all_origins_apart() -> None:
    assert set(render.STYLES) == set(render.LABELS) == set(Origin)
    assert len(set(render.STYLES.values())) == len(Origin)
    assert "loosely accepted" in render.legend().plain


def test_slow_rates_have_decimals() -> None:
    assert [*map(rate, (0.256, 5.25, 17.46, 1456.4))] == ["0.26", "5.25", "17.5", "1,456"]


def test_chunk_without_token_texts_still_shows() -> None:
    assert "ab" in render.painted(Chunk("ab", [1, 2], [Origin.PLAIN, Origin.BONUS]), color=True)
    assert "\x1b[34mab" in render.painted(Chunk("ab", [1], [Origin.BONUS]), color=True)
    assert render.painted(Chunk("end", [], []), color=True) == "end"


@pytest.mark.parametrize("text", ["\x1b[2J", "\x07", "\x08", "\x9b31m", "\r", "\x7f"])
def test_output_cannot_steer_the_terminal(text: str) -> None:
    shown = render.painted(Chunk(text, [1], [Origin.PLAIN]), color=False)
    assert text[0] not in shown


def test_no_colour_runs_over_a_line_break() -> None:
    assert render.paint("a\nb", render.STYLES[Origin.LOOSE]).count("\x1b[0m") == 2
