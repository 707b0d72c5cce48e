"""transformers' modes of generation, in their own process, on the bundled pair; not their times."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from flyspec import bundled
from flyspec.errors import ConfigError, FlyspecError
from flyspec_lab.bench.options import PEERS, parse_peers
from flyspec_lab.bench.peers import PeerSetup, Transformers
from flyspec_lab.bench.reference import Reference

TARGET, DRAFT = str(bundled.TARGET), str(bundled.DRAFT)
OWN = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant",
       "assistant_confidence_threshold": 0.0}  # fmt: skip


async def test_all_but_the_lossy_one_say_what_greedy_decoding_says() -> None:
    tokenizer = Tokenizer.from_file(f"{TARGET}/tokenizer.json")
    prompt = tokenizer.encode("def add(a, b):\n    return").ids
    expected = Reference(TARGET, "float32", threads=1).generate(prompt, 12)
    peers = Transformers(tuple(PEERS.values()), TARGET, DRAFT, "cpu")
    for setup in (
        PeerSetup("float32", 1),
        PeerSetup("float32", 1, assistant=OWN),
        PeerSetup("float32", 1, arguments={"prompt_lookup_num_tokens": 4}),
    ):
        answer = await peers.generate(setup, prompt, 12)
        assert answer.token_ids == expected, setup
        assert answer.first_token_s is not None
        assert 0 < answer.first_token_s <= answer.seconds
    lossy = PeerSetup("float32", 1, OWN, {"assistant_ensemble_weight": 0.5})
    answer = await peers.generate(lossy, prompt, 12, ignore_eos=True)
    assert len(answer.token_ids) == 12
    found = await peers.calibrate("prompt lookup", [prompt], 3)
    assert str(found.setup) in found.tried
    assert {name.split(", ")[0] for name in found.tried} == {"float32", "bfloat16"}
    assert {name.rpartition(" ")[2] for name in found.tried} == {"4", "8", "15"}
    with pytest.raises(FlyspecError, match=r"transformers, float32, 1 thread, nonsense 1: "):
        await peers.generate(PeerSetup(arguments={"nonsense": 1}), prompt, 3)
    again = await peers.generate(PeerSetup(), prompt, 12)
    assert again.token_ids == expected


def test_models_must_be_here(tmp_path: Path) -> None:
    for peers, target, draft, message in (
        (("transformers",), str(tmp_path), "", f"the target's directory.* {tmp_path} is not one"),
        (("assisted",), TARGET, "", "the draft model's directory, which a running stack"),
    ):
        with pytest.raises(ConfigError, match=message):
            Transformers(peers, target, draft, "cpu")


def test_peers_are_named() -> None:
    assert parse_peers("") == ()
    assert parse_peers("greedy, prompt-lookup") == ("transformers", "prompt lookup")
    assert parse_peers("all") == ("transformers", "assisted", "prompt lookup", "ensemble")
    for text in ("medusa", "all,greedy"):
        with pytest.raises(ValueError, match="must be one of greedy, assisted"):
            parse_peers(text)


@pytest.mark.parametrize(
    ("setup", "words"),
    [
        (PeerSetup("bfloat16", 2), "bfloat16, 2 threads"),
        (PeerSetup(assistant={**OWN, "assistant_confidence_threshold": 0.4}),
         "float32, 1 thread, K 4 constant, confidence 0.4"),
        (PeerSetup(assistant=OWN, arguments={"assistant_ensemble_weight": 0.5}),
         "float32, 1 thread, K 4 constant, ensemble_weight 0.5"),
    ],
)  # fmt: skip
def test_a_setup_says_what_it_is(setup: PeerSetup, words: str) -> None:
    assert str(setup) == words
