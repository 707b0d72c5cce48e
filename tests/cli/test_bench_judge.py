"""`flyspec bench judge`: the rounds it generates, and its report; no assertions on times."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flyspec.cli.main import app
from flyspec.engine.logits import process_logits
from flyspec.engine.sampling import choose
from flyspec.rules.presets import RULE_PRESETS
from flyspec.values.rounds import DistributionSpec
from flyspec.values.tokens import SamplingParams
from flyspec_lab.bench.judging import DEFAULT_RULES, SAMPLINGS, measure
from flyspec_lab.bench.options import JudgeOptions
from flyspec_lab.bench.rounds import (
    SEED,
    START_POSITION,
    control_token_ids,
    eos_token_ids,
    make_round,
)

V = 2048
LOSSLESS = [name for name, preset in RULE_PRESETS.items() if preset.lossless]


@pytest.mark.parametrize("label", SAMPLINGS)
@pytest.mark.parametrize("k", [1, 4, 15])
def test_drafts_match_but_for_one(k: int, label: str) -> None:
    sampling = SAMPLINGS[label]
    for likely in (True, False):
        matching = make_round(k, V, sampling, mismatch=False)
        other = make_round(k, V, sampling, mismatch=True, likely=likely)
        for round_ in (matching, other):
            own = choose(round_.logits, sampling, START_POSITION, SEED).tolist()
            wrong = [i for i in range(k) if round_.draft_token_ids[i] != own[i]]
            assert wrong == ([] if round_ is matching else [other.mismatch_index])
            assert round_.logits.shape == (k + 1, V)
            assert round_.logits.dtype == torch.bfloat16
            assert not control_token_ids(V) & {*round_.draft_token_ids, *own}
        at = other.mismatch_index
        assert at is not None
        drafted = other.draft_token_ids[at]
        target = process_logits(other.logits, sampling)[at].float().softmax(-1)[drafted]
        draft = other.draft_log_probs[at, drafted].exp()
        assert (target > 0.1) == likely
        assert (draft > 2 * target) != likely
    assert eos_token_ids(V) < control_token_ids(V)


def test_distributions_are_whole_or_the_most_likely_tokens() -> None:
    round_ = make_round(4, V, SamplingParams(), mismatch=False)
    assert round_.distributions(None) is None
    whole = round_.distributions(DistributionSpec(0))
    assert whole is not None
    assert whole.token_ids is None
    assert torch.allclose(whole.log_probs.exp().sum(-1), torch.ones(4))
    warm = make_round(4, V, SAMPLINGS["temperature 0.7, top-p 0.9"], mismatch=False)
    for raw in (False, True):
        q = warm.distributions(DistributionSpec(0, raw=raw))
        assert q is not None
        assert bool((q.log_probs == -math.inf).any()) != raw
    top = round_.distributions(DistributionSpec(50))
    assert top is not None
    assert top.token_ids is not None
    assert top.log_probs.shape == top.token_ids.shape == (4, 50)
    assert top.token_ids[:, 0].tolist() == round_.draft_token_ids


def test_every_rule_is_timed_where_it_accepts_and_where_it_loses() -> None:
    options = JudgeOptions(V, 16, (15, 8), repeats=2, device="cpu")
    report = measure(options)
    assert [(layer.num_speculative_tokens, layer.rows) for layer in report.layers] == [
        (15, 16), (8, 9),
    ]  # fmt: skip
    assert len(report.rules) == len(DEFAULT_RULES) * len(SAMPLINGS) * 2 * 2
    for cost in report.rules:
        where = (cost.rule, cost.sampling, cost.num_speculative_tokens)
        assert cost.median_ns > 0, where
        if cost.matching:
            assert cost.outcome == "EXACT", where
        elif cost.rule in LOSSLESS or (cost.rule == "cactus" and cost.sampling == "greedy"):
            assert cost.outcome == "REJECTED", where
        elif cost.rule in ("ensemble", "cactus") and cost.sampling != "greedy":
            assert cost.outcome in ("EXACT", "LOOSE"), where  # q is all but p
        elif cost.num_speculative_tokens == 15:
            assert cost.outcome == "LOOSE", where
    assert {c.what for c in report.sampling} > {*SAMPLINGS, "reading distributions, full"}
    assert report.worst_share is not None
    assert math.isfinite(report.worst_share)


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    tiny = [
        "bench", "judge", "--vocab-size", "256", "--hidden-size", "8", "--repeats", "1",
        "--num-speculative-tokens", "8", "--rules", "exact,fly,margin:margin_threshold=0.2",
        "--device", "cpu",
    ]  # fmt: skip
    output = tmp_path / "judge.json"
    result = CliRunner().invoke(app, [*tiny, "--json", "--output", str(output)])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document == json.loads(output.read_text())
    assert document["vocab_size"] == 256
    assert {r["rule"] for r in document["rules"]} == {
        "exact", "fly", "margin:margin_threshold=0.2",
    }  # fmt: skip


def test_flags_of_bench_say_nothing_to_its_subcommand() -> None:
    result = CliRunner().invoke(app, ["bench", "--problems", "3", "judge"])
    assert result.exit_code == 2
    assert "--problems is a flag of `flyspec bench` itself" in result.output.replace("\n", " ")
