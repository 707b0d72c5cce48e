"""The short form of `make check-exact`: a few prompts of each set, every drafter."""

from __future__ import annotations

import pytest

from bench.exactness import exactness
from flyspec.cli.program import run, single
from tests.cli.processes import invoke


@pytest.mark.parametrize(
    "flags",
    [
        ("--limit", "3", "--k", "15"),
        ("--limit", "3", "--k", "15,auto", "--dtype", "bfloat16", "--reference", "plain"),
    ],
    ids=["float64", "bfloat16"],
)
def test_exact_equals_generate_and_plain_decoding(flags):
    more = ("--max-tokens", "32", "--sampled-every", "3", "--max-model-len", "1024")
    done = invoke(*flags, *more, program=lambda: run(single(exactness)))
    assert done.code == 0, done.out + done.err
    assert ": 0 wrong" in done.out
