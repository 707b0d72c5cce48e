"""`flyspec eval --rules`: every rule on prompts without answers, on a stack of tiny models."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from flyspec.bench.conditions import ALL_CONDITIONS
from flyspec.bench.reference import Reference
from flyspec.cli.stack import Stack
from flyspec.errors import ConfigError
from tests.cli.processes import flyspec


def test_log_likelihood_is_the_sum_over_single_steps(models: list[str]) -> None:
    target = models[1]
    prompt, output = [5, 6, 7], [8, 9, 10, 1]
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).requires_grad_(False)
    expected = 0.0
    for i, token in enumerate(output):
        logits = model(torch.tensor([[*prompt, *output[:i]]])).logits[0, -1]
        expected += float(torch.log_softmax(logits, -1)[token])
    for dtype, tolerance in (("float64", 1e-9), ("float32", 1e-3)):
        reference = Reference(target, dtype)
        assert reference.log_likelihood(prompt, output) == pytest.approx(expected, abs=tolerance)
        assert reference.log_likelihood(prompt, []) == 0.0


def test_a_target_that_is_not_here_cannot_be_asked() -> None:
    with pytest.raises(ConfigError, match="needs the target's directory on this machine"):
        Reference("someone/model", "float32")


async def test_all_rules_on_prompts_without_answers(stack: Stack, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "the cat"}\n{"prompt": "def total("}\n')
    output = tmp_path / "report.json"
    result = await flyspec(
        "eval", "--address", stack.address, "--model", stack.options.model,
        "--prompt-file", str(prompts), "--rules", "all", "--max-tokens", "12",
        "--num-speculative-tokens", "5", "--output", str(output),
    )  # fmt: skip
    assert result.code == 0, result.err
    document = json.loads(output.read_text())
    samples = document.pop("samples")
    reports = {r["condition"]: r for r in document["conditions"]}
    assert list(reports) == [c.name for c in ALL_CONDITIONS]
    for name in ("exact", "rejection", "cactus"):  # greedy: both lose nothing
        assert reports[name]["same_as_plain"] == 2
        assert reports[name]["loose_tokens"] == 0
    for condition in ALL_CONDITIONS:
        r = reports[condition.name]
        assert r["accuracy"] is None
        assert -math.inf < r["log_likelihood_per_token"] < 0
        sends = condition.rule.name in ("fuzzy", "fuzzy-reference", "kl", "ensemble")
        assert (r["distribution_bytes_per_round"] > 0) == sends, condition.name
    assert len(samples) == 2 * len(ALL_CONDITIONS)
    by_rule = {s["condition"]: s for s in samples}
    assert by_rule["margin, K = 4"]["num_speculative_tokens"] == 4
    assert by_rule["margin, K = 4"]["rule"]["window_scope"] == "ACROSS_ROUNDS"
