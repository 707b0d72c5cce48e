"""`python -m bench.performance`: the document's tables and plots, from reports."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from bench.performance.__main__ import performance
from bench.performance.parts import parts_of
from bench.performance.reports import read_reports

from bench.documents import write_between
from flyspec.cli.json_output import to_json
from flyspec.errors import ConfigError
from flyspec_lab.bench.modes import Sample
from flyspec_lab.bench.report import report, report_batches
from flyspec_lab.bench.speed import BatchSample

DOCUMENT = Path(__file__).parents[2] / "docs" / "performance.md"
MACHINE = {"processor": "CPU 9000", "instruction_sets": ["avx2"], "cores": 2, "accelerator": "",
           "versions": {"torch": "2.0"}}  # fmt: skip


def speed(group: str, modes: dict[str, float], fixed: Any = None, **facts: Any) -> dict[str, Any]:
    """A report of these modes, each with its seconds for the ten tokens of three prompts."""
    samples = [
        Sample(group, prompt, 0, mode, seconds * (1 + prompt), 10, [1] * 10, 0.1, 20 + 400 * prompt,
               rounds=5, target_ns=1_000_000, draft_ns=0 if mode == "plain" else 500_000)
        for mode, seconds in modes.items() for prompt in range(3)
    ]  # fmt: skip
    others = facts.get("others", ())
    known = {
        "command": ["flyspec", "bench", "--against", "a b"], "machine": MACHINE, "threads": 1,
        "draft_threads": 1, "dtype": "bfloat16", "device": "cpu", "others": others,
        "num_speculative_tokens": ["auto"], "drafters": [""], "calibrations": [], "batches": [],
        "repeats": 5,
    }  # fmt: skip
    return {**known, "groups": report(samples, others, fixed), **facts}


def write(folder: Path, **documents: dict[str, Any]) -> None:
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(to_json(document))


def test_of_what_was_measured_twice_the_report_of_more_repeats_is_taken(tmp_path: Path) -> None:
    write(
        tmp_path,
        a=speed("words", {"plain": 1.0, "fly": 0.25}, repeats=21),
        b=speed("words", {"plain": 1.0, "llama": 2.0, "fly": 0.5}, others=["llama"]),
    )
    parts = parts_of(read_reports(tmp_path))
    assert "| words | fly | 4.00 (" in parts["plain"]
    assert "| words | fly | 4.00 (4.00 to 4.00) |" in parts["others"]  # 2.0 over 0.5


def test_runs_of_a_piece_are_one_report(tmp_path: Path) -> None:
    for run, seconds in {"a": 0.25, "a@2": 1.0, "a@3": 0.5}.items():
        samples = [
            asdict(Sample("words", 0, repeat, mode, took, 10, [1] * 10))
            for repeat in range(5)
            for mode, took in {"plain": 2.0, "fly": seconds}.items()
        ]
        write(tmp_path, **{run: speed("words", {"plain": 2.0, "fly": seconds}, samples=samples)})
    (pooled,) = read_reports(tmp_path)["speed"]
    assert pooled["repeats"] == 15
    assert {(s["repeat"], s["mode"]) for s in pooled["samples"]} == {
        (repeat, mode) for repeat in range(15) for mode in ("plain", "fly")
    }
    assert "| words | fly | 4.00 (" in parts_of({"speed": [pooled]})["plain"]


def test_requests_are_told_apart_by_what_the_drafter_had_to_do(tmp_path: Path) -> None:
    def sample(mode: str, seconds: float, prompt: int = 0, **did: int) -> dict[str, Any]:
        facts = {"group": "words", "prompt": prompt, "repeat": 0, "mode": mode, "seconds": seconds}
        return {**facts, "spec_steps": 0, "draft_ns": 0, **did}

    samples = [
        sample("plain", 1.0), sample("plain", 3.0, prompt=1), sample("plain again", 2.0),
        sample("fly", 0.5), sample("exact", 4.0, draft_ns=5),
        sample("fly", 2.0, prompt=1, draft_ns=5, spec_steps=1),
    ]  # fmt: skip
    write(
        tmp_path,
        a={**speed("words", {"plain": 1.0, "plain again": 1.0}), "samples": samples},
        b={**speed("words", {"plain": 1.0, "fly": 1.0}), "samples": samples[:2]},  # not twice
    )
    lines = parts_of(read_reports(tmp_path))["asked"].splitlines()
    assert lines[2:] == [
        "| (plain decoding again) | 1 | 0.500 |",
        "| was not asked | 1 | 2.000 |",
        "| followed the text | 1 | 0.250 |",
        "| drafted rounds | 1 | 1.500 |",
    ]


def test_every_part_is_written_from_its_reports(tmp_path: Path) -> None:
    samples = [BatchSample("gsm8k", b, r, mode, 1.0 if mode == "plain" else 0.5, 100, 0.1)
               for b in (2, 8) for r in range(2) for mode in ("plain", "fly")]  # fmt: skip
    batches = [asdict(b) for b in report_batches(samples)]
    calibration = {"peer": "transformers", "setup": "float32, 1 thread", "tried": {"a": 1, "b": 2}}
    fixed = {"fly, best fixed K": ["plain", "fly, K 4"]}
    reports = tmp_path / "reports"
    reports.mkdir()
    write(
        reports,
        a=speed("words", {"plain": 1.0, "transformers": 2.0, "fly": 0.25, "exact": 0.5},
                others=["transformers"], calibrations=[calibration]),
        b=speed("words", {"plain": 1.0, "fly, K auto": 0.8, "fly, K 4": 0.5}, fixed,
                num_speculative_tokens=["auto", 0, 4]),
        c={**speed("gsm8k", {"plain": 1.0}), "groups": {}, "batches": batches},
        d=speed("words", {"plain": 1.0, "plain, float32": 0.625}),
        e=speed("words", {"plain": 1.0, "fly, model": 0.5, "fly, multi_level": 0.25},
                drafters=["model", "multi_level"]),
        f={"target": "padded", "num_speculative_tokens": 2, "modes": [
            {"mode": "fly", "cost_ratio": 3.6, "tokens_per_round": 12.5, "speedup": 5.0,
             "bound": 6.25, "share": 0.8, "bytes_per_round": 1234.5, "judge_ms": 0.25}]},
        h=speed("lines", {"plain": 1.0, "fly, K auto": 0.25, "fly, K 15": 0.5},
                num_speculative_tokens=["auto", 15]),
        g={"rule": "fly", "round_ms": 5.0, "hops_ms": 3.0, "echoes_ms": 2.0,
           "hops_over_echoes": 1.5, "exchanges_ms": 2.5, "exchanges_over_echoes": 1.25,
           "proposal_loop_ms": 0.3},
    )  # fmt: skip
    document = tmp_path / "performance.md"
    document.write_text(DOCUMENT.read_text())
    performance(reports=reports, document=document)
    text = document.read_text()
    for expected in (
        "CPU 9000, 2 cores, avx2; torch 2.0.",
        "| words | fly | 4.00 (4.00 to 4.00) | 4.00 | 3 |",
        "| lines | fly | 4.00 (4.00 to 4.00) | 4.00 | 3 |",
        "| lines | fly, K 15 | 2.00 (2.00 to 2.00) | 2.00 | 3 |",
        "| words | fly | 8.00 (8.00 to 8.00) |",
        "| transformers | words | float32, 1 thread | 2 |",
        "| words | fly | 1.25 (1.25 to 1.25) | 2.00 (2.00 to 2.00) | 3 K 4 |",
        "| words | bfloat16 | float32 | 1.60 (1.60 to 1.60) |",
        "| words | fly, multi_level | 4.00 (4.00 to 4.00) | 4.00 | 2.00 |",
        "| gsm8k | fly | 200 (2.00) | 200 (2.00) |",
        "| padded | fly | 2 | 3.6 | 12.5 | 5.00 | 6.25 | 80% | 1,234 | 0.25 |",
        "| g | fly | 5.00 | 3.00 | 2.00 | 1.50 | 2.50 | 1.25 | 0.30 |",
        "```sh\nflyspec bench --against 'a b'",
    ):
        assert expected in text, expected
    assert text.count("| words | fly |") == 5  # of the defaults alone, but for hindsight
    for plot in ("groups", "others", "batches"):
        drawn = (tmp_path / "images" / f"performance-{plot}.svg").read_text()
        assert "<text" in drawn
    performance(reports=reports, document=document)
    assert document.read_text() == text


def test_what_was_not_measured_stays(tmp_path: Path) -> None:
    text = "<!-- rounds -->\nold\n<!-- /rounds -->\n<!-- pairs -->\n<!-- /pairs -->\n"
    parts = {"pairs": "new"}
    assert write_between(text, parts) == text.replace(
        "<!-- pairs -->\n", "<!-- pairs -->\n\nnew\n\n"
    )
    document = tmp_path / "performance.md"
    document.write_text(text)
    with pytest.raises(ConfigError, match="has no reports of `flyspec bench`"):
        performance(reports=tmp_path, document=document)
    write(tmp_path, a=speed("words", {"plain": 1.0, "fly": 0.5}))
    with pytest.raises(ConfigError, match="must have <!-- machine -->"):
        performance(reports=tmp_path, document=document)
    assert document.read_text() == text
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ConfigError, match=r"a\.json: not JSON"):
        performance(reports=tmp_path, document=document)
