"""`bench.drafters`: figures of samples that are known by counting; what retrieval finds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from bench.drafters.__main__ import composed_table, figure_table
from bench.drafters.figures import composed_checks, figures, plain_step_ms
from bench.drafters.retrieval import along
from draft_service.drafters.sources import LookupSource
from flyspec.client import AsyncClient, GenerateOptions
from flyspec.rules import Rule
from flyspec.speculation_length import AUTO
from flyspec_lab.bench.modes import FlyspecMode, Sample

MS = 1_000_000
TOKENS = 40


def mode(drafter: str, k: Any) -> FlyspecMode:
    options = GenerateOptions(rule=Rule("exact"), num_speculative_tokens=k, drafter=drafter)
    return FlyspecMode(f"exact, K {k}, {drafter}", AsyncClient("127.0.0.1:1"), options)


PLAIN = FlyspecMode("plain", AsyncClient("127.0.0.1:1"), GenerateOptions())


def sample(of: FlyspecMode, prompt: int, seconds: float, **more: Any) -> Sample:
    facts: dict[str, Any] = {"token_ids": [5] * TOKENS, "overhead_ns": 3 * MS}
    return Sample("set", prompt, 0, of.name, seconds, TOKENS, **{**facts, **more})


def plain(prompt: int) -> Sample:
    """4 ms for the prompt and its first token, 2 ms for each other one."""
    return sample(PLAIN, prompt, 0.1, rounds=TOKENS, opening_target_ns=4 * MS,
                  target_ns=(4 + 2 * (TOKENS - 1)) * MS)  # fmt: skip


def drafted(of: FlyspecMode, prompt: int, seconds: float, rounds: int, **more: Any) -> Sample:
    """5 ms of drafting and 6 of the target in the first round, 1 and 3 in the others."""
    times = {
        "spec_steps": rounds, "opening_draft_ns": 5 * MS, "draft_ns": (5 + rounds - 1) * MS,
        "opening_target_ns": 6 * MS, "target_ns": (6 + 3 * (rounds - 1)) * MS,
    }  # fmt: skip
    return sample(of, prompt, seconds, rounds=rounds, **{**times, **more})


def test_figures_are_those_of_rounds_behind_the_first() -> None:
    of = mode("model", 5)
    samples = [plain(0), plain(1), drafted(of, 0, 0.05, 10), drafted(of, 1, 0.2, 20)]
    (found,) = figures([PLAIN, of], samples, {"set": ["easy", "hard"]})
    assert (found.set, found.drafter, found.num_speculative_tokens) == ("set", "model", 5)
    assert found.tokens_per_round == pytest.approx(2 * TOKENS / 30)
    assert found.worst_tokens_per_round == pytest.approx(TOKENS / 20)
    assert (found.draft_ms, found.target_ms, found.other_ms) == pytest.approx((1.0, 3.0, 3.0))
    assert found.ratio.median == pytest.approx((2.0 + 0.5) / 2)
    assert (found.ratio.worst, found.worst_prompt) == (pytest.approx(0.5), "hard")
    assert (found.same, found.prompts) == (2, 2)
    assert plain_step_ms(samples) == {"set": pytest.approx(2.0)}


def test_what_drafts_without_a_model_takes_no_time_in_one() -> None:
    of = mode("prompt_lookup", AUTO)
    one = drafted(of, 0, 0.1, 10, draft_ns=0, opening_draft_ns=0, token_ids=[6] * TOKENS)
    (found,) = figures([PLAIN, of], [plain(0), one], {"set": ["p"]})
    assert found.draft_ms == 0.0
    assert found.same == 0
    (never,) = figures([PLAIN, of], [plain(0), replace(one, spec_steps=0)], {"set": ["p"]})
    assert never.draft_ms is None


def test_composed_is_compared_with_the_fastest_of_its_parts_at_the_same_k() -> None:
    modes = {name: mode(name, 5) for name in ("model", "rest", "multi_level", "composed")}
    seconds = {"model": 0.04, "rest": 0.09, "multi_level": 0.01, "composed": 0.0416}
    samples = [plain(0), drafted(mode("model", 15), 0, 0.001, 10)]
    samples += [drafted(modes[name], 0, seconds[name], 10) for name in modes]
    every = [PLAIN, mode("model", 15), *modes.values()]
    (check,) = composed_checks(every, samples)
    assert (check.best, check.num_speculative_tokens) == ("model", 5)
    assert check.ratio.median == pytest.approx(0.04 / 0.0416)
    assert check.holds
    slow = [replace(s, seconds=0.05) if "composed" in s.mode else s for s in samples]
    assert not composed_checks(every, slow)[0].holds
    assert not composed_checks(every, [s for s in samples if "composed" not in s.mode])
    row = composed_table([check]).rows[0]
    assert row[:4] == ["set", "5", "model", "0.96"]


def test_a_row_of_the_table_has_every_k() -> None:
    modes = [mode("model", k) for k in (AUTO, 5)]
    samples = [plain(0), *(drafted(of, 0, 0.05, 10) for of in modes)]
    table = figure_table(figures([PLAIN, *modes], samples, {"set": ["p"]}))
    assert table.columns[2:4] == ["K auto", "K 5"]
    assert table.rows[0][:4] == ["set", "model", "4.00 / 2.00 (2.00)", "4.00 / 2.00 (2.00)"]


def test_retrieval_is_asked_before_every_output_token() -> None:
    prompt, output = [1, 2, 3, 4, 9], [1, 2, 3, 4, 7]
    found = along("set", [(prompt, output, LookupSource())], 2)
    # Behind `1 2` it says 3 4, behind `2 3` and `3 4` what followed them before.
    assert (found.set, found.source, found.places) == ("set", "prompt_lookup", 5)
    assert found.found == pytest.approx(3 / 5)
    assert found.match == pytest.approx((2 + 3 + 4) / 3)
    assert found.first == pytest.approx(2 / 3)
    assert found.right == pytest.approx((2 + 1 + 0) / 3)
    assert found.tokens_per_place == pytest.approx(1 + 3 / 5)
    with pytest.raises(ValueError, match="no output tokens"):
        along("set", [], 2)
