"""What a bench's samples say about rounds, and that a plan for the measured case gives it back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from flyspec.client import AsyncClient, GenerateOptions
from flyspec.rules import Rule
from flyspec.values.admin import MeasuredStep
from flyspec.values.tokens import Origin
from flyspec_lab.bench.modes import FlyspecMode, Sample
from flyspec_lab.bench.planning import measured_modes
from flyspec_lab.planning.measured import KEY, read_measured
from flyspec_lab.planning.plan import Deployment, rate
from tests.cli.processes import invoke
from tests.planning.test_acceptance import decode, rounds, texts

MS = 1_000_000
K = 15


def mode(name: str, k: Any = K, **more: Any) -> FlyspecMode:
    options = GenerateOptions(rule=Rule("exact"), num_speculative_tokens=k, **more)
    return FlyspecMode(name, AsyncClient("127.0.0.1:1"), options)


def sample(prompt: int, agrees: list[bool], name: str = "exact", **more: Any) -> Sample:
    """Return a request: 30 ms until its first token; rounds of 15 ms drafting, 8 and 2 ms."""
    origins = decode(agrees, K)
    number = rounds(origins)
    facts: dict[str, Any] = {
        "seconds": 0.033 + number * 0.025, "tokens": len(origins), "origins": origins,
        "rounds": number + 1, "spec_steps": number, "drafted": number * K, "drafter": "model",
        "total_ns": 31 * MS + number * 25 * MS, "opening_ns": 31 * MS,
        "opening_draft_ns": 0, "opening_target_ns": 20 * MS,
        "draft_ns": number * 15 * MS, "target_ns": 20 * MS + number * 8 * MS,
    }  # fmt: skip
    return Sample("g", prompt, 0, name, **{**facts, **more})


def plain(prompt: int) -> Sample:
    return sample(prompt, [False] * 40, "plain", origins=[Origin.PLAIN] * 40, rounds=40,
                  spec_steps=0, drafted=0, target_ns=20 * MS + 39 * 6 * MS)  # fmt: skip


def test_the_parts_of_rounds_and_openings() -> None:
    samples = [sample(i, agrees) for i, agrees in enumerate(texts(30, 60))]
    costs = [MeasuredStep(1, 3 * MS), MeasuredStep(16, 4 * MS)]
    modes = [mode("plain", 0), mode("exact")]
    (found,) = measured_modes(modes, [*samples, *map(plain, range(30))], costs)
    assert found.draft_token_ns == pytest.approx(1 * MS)
    assert found.verify_ns == pytest.approx(8 * MS)
    assert found.rest_ns == pytest.approx(2 * MS)
    assert found.plain_token_ns == pytest.approx(6 * MS)
    assert found.opening_target_ns == pytest.approx(20 * MS)
    assert found.opening_rest_ns == pytest.approx(13 * MS)
    assert (found.undrafted_tokens, found.requests, found.drafter) == (1, 30, "model")
    one = rate(found, Deployment(), K)
    assert one.tokens_per_s == pytest.approx(found.tokens_per_second, rel=0.03)
    assert rate(found, Deployment(cores=2), K).tokens_per_s == pytest.approx(one.tokens_per_s)


def test_of_repeats_the_typical_one_counts() -> None:
    samples = [sample(i, agrees) for i, agrees in enumerate(texts(30, 60))]
    slow = [sample(i, agrees, seconds=60.0) for i, agrees in enumerate(texts(30, 60))]
    (found,) = measured_modes([mode("exact")], [*samples, *slow, *samples])
    assert found == measured_modes([mode("exact")], samples)[0]


def test_modes_that_cannot_be_planned_are_left_out() -> None:
    agrees = texts(1, 60)[0]
    modes = [mode("auto", "auto"), mode("plain", 0), mode("exact")]
    names = [m.mode for m in measured_modes(modes, [sample(0, agrees, m.name) for m in modes])]
    assert names == ["exact"]
    assert measured_modes(modes, [sample(0, agrees, drafted=0, spec_steps=0)]) == []


# --- the commands --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """The document of a real bench."""
    file = tmp_path_factory.mktemp("plan") / "bench.json"
    done = invoke(
        "bench", "--problems", "3", "--repeats", "1", "--max-tokens", "48", "--rules", "exact",
        "--num-speculative-tokens", "15", "--threads", "1", "--output", str(file),
    )  # fmt: skip
    assert done.code == 0, done.err
    return file


def test_a_bench_has_what_a_plan_needs(bench) -> None:
    (mode_,) = json.loads(bench.read_text())[KEY]
    (measured,) = read_measured(bench)
    assert (measured.drafter, measured.rule, measured.requests) == ("model", "exact", 3)
    assert measured.step_costs
    assert measured.undrafted_tokens >= 1
    assert min(measured.draft_token_ns, measured.verify_ns, measured.rest_ns) > 0
    assert min(measured.opening_target_ns, measured.opening_rest_ns) > 0
    assert mode_["ahead_share"] == 0.5


def test_a_plan_is_shown_and_written(bench) -> None:
    arguments = ["plan", str(bench), "--clients", "1,4", "--num-speculative-tokens", "4,8"]
    done = invoke(*arguments, "--draft-rtt-ms", "20", "--targets", "2")
    assert done.code == 0, done.err
    assert "2 targets, 1 drafter" in done.out
    assert "drafter beside" in done.out
    done = invoke(*arguments, "--draft-rtt-ms", "20", "--tokens-per-second", "1", "--json")
    assert done.code == 0, done.err
    (document,) = done.documents
    cells = [(r["clients"], r["num_speculative_tokens"]) for r in document["rates"]]
    assert cells == [(1, 4), (1, 8), (4, 4), (4, 8)]
    one = document["best"][0]["bounds"]
    assert one["one_remote"] < one["one_beside"]
    assert (document["devices"]["targets"], document["devices"]["drafters"]) == (1, 1)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--cores", "2", "--targets", "2"], "one machine has one target"),
        (["--clients", "5000"], "at most 4096"),
        (["--clients", "0"], "must be a comma-separated list of integers of at least 1"),
        (["--num-speculative-tokens", "2000"], "at most 1024"),
        (["--tokens-per-second", "1e9"], "raise --clients"),
        (["--tokens-per-second", "9", "--cores", "2"], "remove --cores"),
        (["--drafter", "none"], "there is model"),
        (["--draft-rtt-ms", "-1"], "draft-rtt-ms"),
    ],
)
def test_bad_input_says_what_to_change(bench, flags, why) -> None:
    done = invoke("plan", str(bench), *flags)
    assert done.code == 2
    assert why in " ".join(done.err.split())
