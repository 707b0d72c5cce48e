"""Datastores against a search written from the definition; files, shards and refusals."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flyspec.cli.datastore import read_texts
from flyspec.datastore import store
from flyspec.datastore.build import build
from flyspec.datastore.store import MAX_MATCH, MIN_MATCH, NOTHING, UNSEEN, Datastore
from flyspec.errors import ConfigError

TEXTS = st.lists(st.lists(st.integers(0, 3), max_size=25), min_size=1, max_size=6)


@pytest.fixture(autouse=True, scope="module")
def everything_compared() -> Iterator[None]:
    """Compare all continuations, and forget where pairs are now and then."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "MAX_SAMPLES", 1 << 20)
        patch.setattr(store, "MAX_PAIRS", 3)
        yield


def brute_force(
    texts: Sequence[Sequence[int]], last: Sequence[int], most: int
) -> tuple[int, list[Counter[int]]]:
    """Return the longest match, and how often each token followed, given the ones before it."""
    for length in range(min(MAX_MATCH, len(last)), MIN_MATCH - 1, -1):
        runs = [
            list(text[at + length : at + length + most])
            for text in texts
            for at in range(len(text) - length + 1)
            if list(text[at : at + length]) == list(last[-length:])
        ]
        if runs:
            return length, [Counter(run[0] for run in runs if run)]
    return 0, []


@given(TEXTS, st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 5))
def test_equals_brute_force(texts: list[list[int]], last: list[int], most: int) -> None:
    with TemporaryDirectory() as place:
        build(Path(place) / "store", texts, "", 4)
        found = Datastore(Path(place) / "store").find(last, most)
    length, counts = brute_force(texts, last, most)
    assert found.length == length
    if not length or not counts[0]:
        assert not found.token_ids
        return
    total = sum(counts[0].values())
    assert counts[0][found.token_ids[0]] == max(counts[0].values())
    assert found.confidences[0] == max(counts[0].values()) / (total + UNSEEN)
    assert len(found.token_ids) == len(found.confidences) <= most
    continued = [*last[-length:], *found.token_ids]
    joined = [",".join(map(str, text)) for text in texts]
    assert any(",".join(map(str, continued)) in text for text in joined)


@given(TEXTS, st.lists(st.integers(0, 3), min_size=2, max_size=6), st.integers(2, 30))
def test_shards_are_one_datastore_but_for_what_crosses_them(
    texts: list[list[int]], last: list[int], most: int
) -> None:
    with TemporaryDirectory() as place:
        whole = build(Path(place) / "whole", texts, "", 4)
        parts = build(Path(place) / "parts", texts, "", 4, max_shard_tokens=most)
        assert sum(whole.shards) == sum(parts.shards) == sum(len(text) + 1 for text in texts)
        assert max(parts.shards) <= most
        found = Datastore(Path(place) / "parts").find(last, 1)
        assert found.length <= Datastore(Path(place) / "whole").find(last, 1).length


def test_ids_of_a_large_vocabulary(tmp_path: Path) -> None:
    facts = build(tmp_path / "store", [[70_000, 65_535, 1, 2], [3]], "print", 200_000)
    assert (facts.token_bytes, facts.num_texts, list(facts.shards)) == (4, 2, [7])
    store = Datastore(tmp_path / "store")
    assert store.facts == facts
    assert store.find([5, 70_000, 65_535], 5).token_ids == [1, 2]
    assert store.find([70_000], 5) == store.find([70_000, 65_535], 0) == NOTHING


def test_refusals(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="make a datastore with `flyspec datastore build`"):
        Datastore(tmp_path)
    (tmp_path / "datastore.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not valid"):
        Datastore(tmp_path)
    with pytest.raises(ConfigError, match="name a new directory"):
        build(tmp_path, [[1]], "", 4)
    with pytest.raises(ConfigError, match="name files that are not empty"):
        build(tmp_path / "empty", [], "", 4)
    assert not (tmp_path / "empty").exists()
    build(tmp_path / "store", [[1, 2, 3]], "", 4)
    facts = json.loads((tmp_path / "store/datastore.json").read_text())
    (tmp_path / "store/datastore.json").write_text(json.dumps({**facts, "format": 2}))
    with pytest.raises(ConfigError, match="build the datastore again"):
        Datastore(tmp_path / "store")
    (tmp_path / "store/datastore.json").write_text(json.dumps({**facts, "shards": [5]}))
    with pytest.raises(ConfigError, match="has 4 entries instead of 5"):
        Datastore(tmp_path / "store")
    (tmp_path / "store/datastore.json").write_text(json.dumps({**facts, "shards": [4, 4]}))
    with pytest.raises(ConfigError, match=r"cannot read 0001.tokens"):
        Datastore(tmp_path / "store")


def test_texts_of_files_and_directories(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/d.py").write_text("hidden")
    lines = '{"text": "three"}\n\n{"content": "four"}\n'
    (tmp_path / "e.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    assert [*read_texts([tmp_path])] == ["one", "two", "three", "four"]
    assert [*read_texts([tmp_path], "*.py")] == ["one"]
    assert [*read_texts([tmp_path / "b.txt"])] == ["two"]
    for content, problem in (("[1", "f.jsonl:1: not JSON"), ('{"t": 1}', "needs a text in the")):
        (tmp_path / "f.jsonl").write_text(content)
        with pytest.raises(ConfigError, match=problem):
            [*read_texts([tmp_path / "f.jsonl"])]
    with pytest.raises(ConfigError, match=r"c\.bin"):
        [*read_texts([tmp_path / "c.bin"])]
    with pytest.raises(ConfigError, match="No such file"):
        [*read_texts([tmp_path / "missing"])]
