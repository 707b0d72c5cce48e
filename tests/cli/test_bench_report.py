"""`flyspec bench`: groups, turns, and evaluating samples; no assertions on times."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from bench.edits import edits
from flyspec.cli.conditions import Condition
from flyspec.cli.json_output import to_json
from flyspec.errors import ConfigError
from flyspec.rules import Rule
from flyspec.values.generation import GenerationTimings, SpeculationMetrics
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.options import SpeedOptions
from flyspec_lab.bench.prompts import groups_of, in_turn, random_tokens
from flyspec_lab.bench.report import ModeReport, report, report_batches
from flyspec_lab.bench.speed import BatchSample, hindsight
from flyspec_lab.statistics import median_interval
from tests.tiny import make_tokenizer


def sample(
    mode: str, prompt: int, seconds: float, repeat: int = 0, target_ns: int = 0, **more: Any
) -> Sample:
    facts = {"token_ids": [1] * 10, "timings": GenerationTimings(target_model_ns=target_ns), **more}
    return Sample("g", prompt, repeat, mode, seconds, 10, **facts)


def modes(samples: list[Sample], **how: Any) -> dict[str, ModeReport]:
    return {r.mode: r for r in report(samples, **how)["g"]}


def drafted(
    mode: str, prompt: int, seconds: float, target_ns: int = 2_000_000, **more: Any
) -> Sample:
    done = SpeculationMetrics(2, 10, 8, num_loose_tokens=1, num_rounds=2)
    timings = GenerationTimings(
        target_model_ns=target_ns, draft_model_ns=1_000_000, round_overhead_p50_ns=1_500_000
    )
    return sample(mode, prompt, seconds, speculation=done, timings=timings, **more)


def test_ratios_are_taken_a_prompt_and_then_their_median() -> None:
    samples = []
    for prompt, (plain, fly) in enumerate([(1.0, 0.5), (2.0, 0.5), (4.0, 4.0)]):
        samples += [sample("plain", prompt, plain), drafted("fly", prompt, fly)]
    fly = modes(samples)["fly"]
    assert fly.ratios["plain"].median == 2.0  # of 2, 4, 1
    assert (fly.ratios["plain"].worst, fly.ratios["plain"].worst_prompt) == (1.0, 2)
    assert fly.ratios["plain"].low <= 2.0 <= fly.ratios["plain"].high
    assert fly.tokens_per_second == pytest.approx(30 / 5.0)
    assert fly.mean_accepted_tokens == 5.0
    assert fly.mean_acceptance_length == 5.0
    assert fly.loose_share == 0.1
    assert fly.round_overhead_p50_ms == 1.5
    assert (fly.same_as_plain, fly.prompts) == (3, 3)


def test_a_repeat_that_was_held_up_does_not_count() -> None:
    samples = [sample("plain", 0, s, i) for i, s in enumerate([1.0, 1.0, 1.0])]
    samples += [sample("fly", 0, s, i) for i, s in enumerate([0.5, 60.0, 0.5])]
    assert modes(samples)["fly"].ratios["plain"].median == 2.0
    assert modes(samples)["fly"].tokens_per_second == 20.0


def test_a_machine_that_changes_its_speed_changes_no_ratio() -> None:
    samples = []
    for repeat, slowness in enumerate([1.0, 3.0, 1.5, 2.0]):  # of all alike
        samples += [
            sample("plain", 0, slowness, repeat, first_token_s=0.1 * slowness),
            sample("exact", 0, 0.5 * slowness, repeat, first_token_s=0.2 * slowness),
        ]
    exact = modes(samples)["exact"]
    assert exact.ratios["plain"].median == 2.0
    assert exact.first_token_ms == pytest.approx(350.0)
    assert exact.decode_ratio == pytest.approx(0.9 / 0.3)
    assert modes([sample("plain", 0, 1.0)])["plain"].first_token_ms is None


def test_ratios_are_to_plain_and_to_what_is_not_flyspec() -> None:
    samples = [
        sample("plain", 0, 1.0), sample("fly", 0, 0.5),
        # Each in repeats that it shares only with plain decoding.
        sample("plain", 0, 2.0, 1), sample("llama", 0, 0.5, 1, token_ids=()),
        sample("plain", 0, 1.0, 2), sample("transformers", 0, 2.0, 2),
        sample("plain", 1, 1.0), sample("fly", 1, 0.5),  # others were interrupted before it
    ]  # fmt: skip
    reports = modes(samples, others=["transformers", "llama"])
    assert list(reports) == ["plain", "transformers", "llama", "fly"]
    ratios = {name: ratio.median for name, ratio in reports["fly"].ratios.items()}
    assert ratios == {"plain": 2.0, "llama": 0.5, "transformers": 4.0}
    assert reports["llama"].same_as_plain is None


def test_the_bound_is_the_target_s_time_alone() -> None:
    samples = [
        sample("plain", 0, 1.0, target_ns=800_000_000),
        # 10 tokens in 2 rounds, a verify step costs 1.25 plain steps: 5 / 1.25 = 4.
        drafted("fly", 0, 0.5, target_ns=200_000_000),
        sample("llama", 0, 1.0),
    ]
    reports = modes(samples, others=["llama"])
    assert reports["fly"].bound == pytest.approx(4.0)
    assert reports["fly"].bound_share == pytest.approx(0.5)
    assert (reports["fly"].verify_step_ms, reports["fly"].judge_ms) == (100.0, None)
    assert reports["plain"].bound == 1.0
    assert reports["llama"].bound is None


def test_hindsight_takes_each_prompt_s_fastest_fixed_k() -> None:
    fly = Condition("fly", Rule("fly"))
    set_apart = Condition("exact, 2", Rule("exact"), 2)
    options = SpeedOptions(rules=(fly, set_apart), num_speculative_tokens=("auto", 0, 4, 15))
    fixed = hindsight(options)
    assert fixed == {"fly, best fixed K": ["plain", "fly, K 4", "fly, K 15"]}
    assert hindsight(SpeedOptions(rules=(fly,), num_speculative_tokens=("auto", 4))) == {}
    samples = []
    for prompt, seconds in enumerate([(1.0, 2.0, 3.0), (3.0, 1.0, 2.0), (3.0, 2.0, 1.0)]):
        for mode, took in zip(fixed["fly, best fixed K"], seconds, strict=True):
            samples.append(sample(mode, prompt, took))
    best = modes(samples, fixed=fixed)["fly, best fixed K"]
    assert best.chosen == ("plain", "fly, K 4", "fly, K 15")
    assert best.ratios["plain"].median == 3.0
    assert best.ratios["plain"].worst == 1.0


def test_an_interval_is_that_of_resampled_medians() -> None:
    rng = random.Random(3)
    values = [rng.gauss(1.0, 0.2) for _ in range(12)]
    low, high = median_interval(values)
    assert (low, high) == median_interval(values)
    medians = sorted(statistics.median(rng.choices(values, k=12)) for _ in range(20_000))
    assert low == pytest.approx(medians[500], abs=0.03)
    assert high == pytest.approx(medians[19_500], abs=0.03)
    assert median_interval([2.0]) == (2.0, 2.0)


def test_requests_at_once_are_compared_within_their_repeat() -> None:
    samples = []
    for repeat, drift in enumerate([1.0, 10.0, 2.0]):
        samples.append(BatchSample("g", 8, repeat, "plain", drift, 100, 0.1))
        samples.append(BatchSample("g", 8, repeat, "fly", drift / 2, 100, 0.2))
    plain, fly = report_batches(samples)
    assert (plain.ratio_to_plain, fly.ratio_to_plain, fly.low, fly.high) == (1.0, 2.0, 2.0, 2.0)
    assert fly.tokens_per_second == 100.0


def test_documents_are_json() -> None:
    samples = []
    for prompt in range(3):
        samples += [
            sample("plain", prompt, 1.0, target_ns=8_000_000, first_token_s=0.1),
            sample("transformers", prompt, 2.0),
            drafted("fly, K auto", prompt, 0.5 + prompt / 10, first_token_s=0.2),
            drafted("fly, K 4", prompt, 0.5), drafted("fly, K 15", prompt, 0.4),
        ]  # fmt: skip
    fixed = {"fly, best fixed K": ["fly, K 4", "fly, K 15"]}
    found = report(samples, ["transformers"], fixed)
    document = json.loads(to_json(found))
    assert document["g"][2]["ratios"]["plain"]["worst_prompt"] == 2


# --- what is measured on ----------------------------------------------------------------------


def texts_of(**options: Any) -> dict[str, list[str]]:
    return {g.name: [p.text for p in g.prompts] for g in groups_of(SpeedOptions(**options))}


def test_problems_are_the_default_only_without_other_prompts(tmp_path: Path) -> None:
    assert {name: len(texts) for name, texts in texts_of().items()} == {"word problems": 20}
    assert texts_of(problems=5) == texts_of(problems=5)
    assert texts_of(problems=5) != texts_of(problems=5, problem_seed=8)
    assert texts_of(random_prompts=3) == {}
    path = tmp_path / "some.jsonl.gz"
    path.write_text("one\ntwo\n")
    assert texts_of(prompt_file=[str(path)]) == {"some": ["one", "two"]}
    (tmp_path / "other").mkdir()
    other = path.rename(tmp_path / "other" / path.name)
    path.write_text("three")
    names = list(texts_of(prompt_file=[str(path), str(other)], problems=3))
    assert names == ["word problems", str(path), str(other)]


def test_predictions_are_those_of_the_files(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    row = {"messages": [{"content": "Edit."}], "prediction": {"content": "old"}}
    path.write_text(json.dumps(row))
    (group,) = groups_of(SpeedOptions(prompt_file=[str(path)], prediction=True))
    assert [p.prediction for p in group.prompts] == ["old"]
    with pytest.raises(ConfigError, match="--prediction: problem 0 of seed 7 has none"):
        groups_of(SpeedOptions(prediction=True))


def test_edits_of_the_project_have_their_originals(tmp_path: Path) -> None:
    path = tmp_path / "edits.jsonl"
    path.write_text("\n".join(map(json.dumps, edits())))
    (group,) = groups_of(SpeedOptions(prompt_file=[str(path)], prediction=True))
    assert len({p.text for p in group.prompts}) == len(group.prompts) > 8
    assert all(p.prediction in p.text for p in group.prompts)


def test_a_file_is_split_by_category_and_each_is_thinned_evenly(tmp_path: Path) -> None:
    path = tmp_path / "spec_bench.jsonl"
    kinds = ["writing", "coding", "qa", "qa", "rag", "math_reasoning", "math", "stem"]
    rows = [{"category": k, "turns": [f"{k} {i}"]} for i, k in enumerate(kinds)]
    path.write_text("\n".join(map(json.dumps, rows)))
    assert texts_of(prompt_file=[str(path)], limit=2) == {
        "spec_bench/mt": ["writing 0", "math 6"],
        "spec_bench/qa": ["qa 2", "qa 3"],
        "spec_bench/rag": ["rag 4"],
        "spec_bench/math_reasoning": ["math_reasoning 5"],
    }


def test_random_tokens_are_drawn_by_seed_and_are_no_special_ones(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    group = random_tokens(6, str(tmp_path), seed=5)
    assert group == random_tokens(6, str(tmp_path), seed=5)
    assert group.prompts != random_tokens(6, str(tmp_path), seed=6).prompts
    for prompt in group.prompts:
        assert 16 <= len(prompt.token_ids) <= 256
        assert min(prompt.token_ids) > 2  # <s>, </s>, <pad>
        assert prompt.to_request(True) == prompt.token_ids
    with pytest.raises(ConfigError, match=r"--random-prompts draws from .*nowhere"):
        random_tokens(1, str(tmp_path / "nowhere"), 1)


def test_groups_take_turns_over_the_whole_of_a_repeat() -> None:
    three = (12, 4, 4)
    for repeat in range(3):
        turns = in_turn(three, repeat)
        assert sorted(turns) == [(g, i) for g, n in enumerate(three) for i in range(n)]
        for half in (turns[:10], turns[10:]):
            assert Counter(g for g, _ in half) == {0: 6, 1: 2, 2: 2}
    assert {in_turn(three[1:], r)[0][0] for r in range(2)} == {0, 1}
