"""A plan from measurements that were made up, calculated by hand."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import Any

import pytest

from flyspec.cli.json_output import to_json
from flyspec.errors import ConfigError
from flyspec.values.admin import MeasuredStep
from flyspec_lab.planning.acceptance import AgreeingRuns
from flyspec_lab.planning.measured import KEY, MeasuredMode, choose, read_measured
from flyspec_lab.planning.plan import Deployment, bounds, devices_for, notes, rate

MS = 1e6
P = 0.8


def measured(**more: Any) -> MeasuredMode:
    """Return a mode of 100 tokens; a step takes 10 ms and 0.1 ms a token, a drafted token 1 ms."""
    facts: dict[str, Any] = {
        "mode": "exact", "group": "word problems", "rule": "exact", "drafter": "model",
        "token_exact": True, "num_speculative_tokens": 15, "requests": 20,
        "tokens_per_request": 101.0, "undrafted_tokens": 1.0, "tokens_per_second": 100.0,
        "mean_draft_tokens": 15.0, "agreement": AgreeingRuns((1.0, P), P),
        "draft_token_ns": 1 * MS, "verify_ns": 11.6 * MS, "rest_ns": 2 * MS,
        "opening_draft_ns": 0.0, "opening_target_ns": 0.0, "opening_rest_ns": 0.0,
        "plain_token_ns": 10.1 * MS,
        "step_costs": [MeasuredStep(n, round((10 + 0.1 * n) * MS)) for n in (1, 16, 64)],
    }  # fmt: skip
    return MeasuredMode(**{**facts, **more})


def tokens(k: int, p: float = P) -> float:
    return (1 - p ** (k + 1)) / (1 - p)


@pytest.mark.parametrize("k", [1, 4, 15])
def test_one_request_takes_its_parts_one_after_the_other(k) -> None:
    found = rate(measured(tokens_per_request=1e6), Deployment(), k)
    round_ms = k * 1 + (10 + 0.1 * (k + 1)) + 2
    assert found.round_ms == pytest.approx(round_ms)
    assert found.tokens_per_round == pytest.approx(tokens(k))
    assert found.tokens_per_s == pytest.approx(1000 * tokens(k) / round_ms, rel=1e-3)
    assert found.rounds_per_step == 1


def test_openings_and_trips_are_paid_for_each_request() -> None:
    m = measured(opening_target_ns=20 * MS, opening_rest_ns=5 * MS)
    rounds = m.rounds(4)
    far = Deployment(draft_rtt_ms=3.0, verify_rtt_ms=2.0)
    request_ms = 25 + rounds * (4 + 10.5 + 2) + (rounds + 1) * 5
    assert rate(m, far, 4).tokens_per_s == pytest.approx(101 / request_ms * 1000)


def test_drafting_ahead_happens_where_most_rounds_use_it() -> None:
    sure = measured(agreement=AgreeingRuns((1.0, 0.97), 0.97), ahead_share=0.5)
    assert rate(sure, Deployment(), 4).drafted_ahead == pytest.approx(0.97**5)
    assert rate(sure, Deployment(draft_ahead=False), 4).drafted_ahead == 0
    assert rate(measured(ahead_share=0.5), Deployment(), 4).drafted_ahead == 0  # 0.8 ** 5


def test_bounds_by_hand() -> None:
    m = measured(tokens_per_request=1e6)
    found = bounds(m, Deployment(clients=8, targets=2, draft_rtt_ms=30.0), 5)
    assert found.plain == pytest.approx(8 / 10.4e-3)  # two steps over four tokens each
    assert found.target_alone == pytest.approx(8 * tokens(5) / 12.4e-3)
    assert found.one_beside == pytest.approx(tokens(5) / 17.6e-3, rel=1e-3)
    assert found.one_remote == pytest.approx(tokens(5) / 47.6e-3, rel=1e-3)
    assert found.clients_per_target == pytest.approx(1 + 5 / 10.6)
    assert found.clients_per_target_with_trips == pytest.approx(1 + (5 + 30 + 2) / 10.6, rel=1e-3)


def test_no_distance_makes_a_request_faster() -> None:
    for rtt_ms in (0.0, 1.0, 10.0, 100.0):
        found = bounds(measured(), Deployment(draft_rtt_ms=rtt_ms), 8)
        assert found.one_remote <= found.one_beside


def test_the_devices_for_a_rate_reach_it_and_fewer_do_not() -> None:
    in_turn = [MeasuredStep(n, round(n * MS)) for n in (1, 64)]  # nothing to batch
    m = measured(
        step_costs=in_turn, verify_ns=16 * MS, plain_token_ns=1 * MS, draft_token_ns=9 * MS
    )
    o = Deployment(clients=32)
    found = devices_for(m, o, (4, 8), 1200.0)
    assert found is not None

    def fastest(targets: int, drafters: int) -> float:
        there = replace(o, targets=targets, drafters=drafters)
        return max(rate(m, there, k).tokens_per_s for k in (4, 8))

    assert fastest(found.targets, found.drafters) >= 1200.0
    assert found.targets > 1
    assert found.drafters > 1
    assert fastest(found.targets - 1, 32) < 1200.0
    assert fastest(found.targets, found.drafters - 1) < 1200.0
    assert devices_for(m, o, (4, 8), 1e6) is None


def test_steps_are_scaled_to_plain_tokens_and_moved_to_rounds() -> None:
    m = measured(plain_token_ns=20.2 * MS, verify_ns=24.2 * MS)  # twice as slow, 1 ms cold
    assert m.step_ns(16) == pytest.approx(24.2 * MS)
    assert m.step_ns(64) == pytest.approx((2 * 16.4 + 1) * MS)
    unknown = measured(step_costs=(), plain_token_ns=None)
    assert unknown.step_ns(1) == unknown.step_ns(64) == pytest.approx(11.6 * MS)
    two = measured(step_costs=())
    assert two.step_ns(16) == pytest.approx(11.6 * MS)
    assert two.step_ns(31) == pytest.approx(13.1 * MS)


def test_what_makes_a_plan_doubtful_is_said() -> None:
    assert notes(measured(), Deployment(), (4, 15)) == []
    (said,) = notes(measured(), Deployment(), (4, 16))
    assert "beyond the measured K = 15" in said
    (said,) = notes(measured(mean_draft_tokens=3.0), Deployment(), (4,))
    assert "drafted 3.0 tokens" in said
    (said,) = notes(measured(rule="fly", token_exact=False), Deployment(), (4,))
    assert "fly judges" in said


# --- reading a bench ---------------------------------------------------------------------------


def test_a_mode_comes_back_from_a_document(tmp_path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(to_json({"kind": "speed", KEY: [measured()]}))
    (found,) = read_measured(file)
    assert json.loads(to_json(found)) == json.loads(to_json(asdict(measured())))
    assert rate(found, Deployment(), 4) == rate(measured(), Deployment(), 4)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "is not JSON; measure with"),
        ("[]", "has no mode with drafts"),
        ('{"planning": []}', "has no mode with drafts"),
        ('{"planning": [{"mode": 1}]}', "planning.0.mode: Input should be a valid string"),
    ],
)
def test_other_files_are_refused(text, why, tmp_path) -> None:
    file = tmp_path / "bench.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=why):
        read_measured(file)
    with pytest.raises(ConfigError, match="No such file"):
        read_measured(tmp_path / "none.json")


def test_of_several_modes_the_largest_k_of_the_named_kind_is_taken() -> None:
    modes = [measured(num_speculative_tokens=k) for k in (4, 15, 8)]
    assert choose(modes, "", "", "").num_speculative_tokens == 15
    modes.append(measured(drafter="multi_level"))
    assert choose(modes, "", "multi_level", "").drafter == "multi_level"
    with pytest.raises(ConfigError, match="give --drafter, one of model, multi_level"):
        choose(modes, "", "", "")
    with pytest.raises(ConfigError, match="--rule fly: was not measured; there is exact"):
        choose(modes, "fly", "model", "")
    modes.append(measured(rule="fly", drafter="far"))
    with pytest.raises(ConfigError, match="no mode has this rule, drafter and group"):
        choose(modes, "fly", "model", "")
