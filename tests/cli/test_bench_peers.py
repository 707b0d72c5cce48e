"""transformers' modes of generation, in their own process, on the bundled pair; not their times."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from flyspec import bundled
from flyspec.errors import ConfigError, FlyspecError
from flyspec_lab.bench.modes import Answer
from flyspec_lab.bench.options import parse_peers
from flyspec_lab.bench.peers import Setup, Transformers, described
from flyspec_lab.bench.reference import Reference

FLOAT32 = {"dtype": "float32", "threads": 1}
TARGET, DRAFT = str(bundled.TARGET), str(bundled.DRAFT)
OWN = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant",
       "assistant_confidence_threshold": 0.0}  # fmt: skip


async def test_all_but_the_lossy_one_say_what_greedy_decoding_says() -> None:
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    prompt = tokenizer.encode("def add(a, b):\n    return").ids
    expected = Reference(TARGET, "float32", threads=1).generate(prompt, 12)
    peers = Transformers(TARGET, DRAFT, "cpu", ignore_eos=True)
    for more in (OWN, {"prompt_lookup_num_tokens": 4}, {}):
        answer = await peers.generate({**FLOAT32, **more}, prompt, 12)
        assert answer.token_ids == expected, more
        assert answer.first_token_s is not None
        assert 0 < answer.first_token_s <= answer.seconds
    lossy = {**FLOAT32, **OWN, "assistant_ensemble_weight": 0.5}
    assert len((await peers.generate(lossy, prompt, 12)).token_ids) == 12
    with pytest.raises(FlyspecError, match=r"transformers, dtype float32, threads 1, nonsense 1: "):
        await peers.generate({**FLOAT32, "nonsense": 1}, prompt, 3)


class Timed(Transformers):
    """Takes a scripted time."""

    def __init__(self) -> None:
        super().__init__(TARGET, DRAFT, "cpu")
        self.runs: list[str] = []

    async def generate(self, setup: Setup, token_ids: Sequence[int], max_tokens: int) -> Answer:
        self.runs.append(described(setup))
        took = {4: 0.1, 8: 0.05, 15: 9.0}[setup["prompt_lookup_num_tokens"]]
        return Answer(max_tokens, took * (3 if setup["dtype"] == "float32" else 1), None)


async def test_the_fastest_setup_is_found_stage_by_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flyspec_lab.bench.peers.THREADS", (1,))
    peers = Timed()
    found = await peers.calibrate("prompt lookup", [[1], [2]])
    setup = {"dtype": "bfloat16", "threads": 1}
    assert found.setup == {**setup, "prompt_lookup_num_tokens": 8}
    names = [
        *(described({**setup, "prompt_lookup_num_tokens": k}) for k in (4, 8, 15)),
        "dtype float32, threads 1, prompt_lookup_num_tokens 4",
    ]
    assert found.tried == pytest.approx(dict(zip(names, (0.2, 0.1, 9.0, 0.3), strict=True)))
    assert list(map(peers.runs.count, names)) == [5, 5, 3, 3]


async def test_models_must_be_here(tmp_path: Path) -> None:
    for peer, target, message in (
        ("transformers", str(tmp_path), f"the target's directory.* {tmp_path} is not one"),
        ("assisted", TARGET, "the draft model's directory for assisted, which a running stack"),
    ):
        with pytest.raises(ConfigError, match=message):
            await Transformers(target, "", "cpu").calibrate(peer, [[1]])


def test_peers_are_named() -> None:
    assert parse_peers("") == ()
    assert parse_peers("greedy, prompt-lookup") == ("transformers", "prompt lookup")
    assert parse_peers("all") == ("transformers", "assisted", "prompt lookup", "ensemble")
    for text in ("medusa", "all,greedy"):
        with pytest.raises(ValueError, match="must be one of greedy, assisted"):
            parse_peers(text)
