"""The short form of `make check-exact`: a few prompts of each set, every drafter."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "flags",
    [
        ("--limit", "3", "--k", "15"),
        ("--limit", "3", "--k", "15,auto", "--dtype", "bfloat16", "--reference", "plain"),
    ],
    ids=["float64", "bfloat16"],
)
def test_exact_equals_generate_and_plain_decoding(flags):
    command = [sys.executable, "-m", "bench.exactness", *flags]
    done = subprocess.run(
        [*command, "--max-tokens", "32", "--sampled-every", "3", "--max-model-len", "1024"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    print(done.stdout, done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ": 0 wrong" in done.stdout
