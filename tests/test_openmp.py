"""OpenMP's threads wait briefly where GGUF files draft beside one; the user's choice stands."""

from __future__ import annotations

import pytest

from flyspec.openmp import POLICY, SPINS, openmp_environment


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    for name in (SPINS, POLICY):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("target", "heads", "is_brief"),
    [
        ("models/a", "", False),
        ("a.gguf", "", False),
        ("a.gguf", "e=models/eagle", False),
        ("models/a", "beside=b.gguf", False),
        ("a.gguf", "e=models/eagle beside=b.gguf", True),
    ],
)
def test_waits_are_brief_if_a_gguf_file_drafts_beside_another(target, heads, is_brief):
    assert (SPINS in openmp_environment(target, heads)) == is_brief


@pytest.mark.parametrize("name", [SPINS, POLICY])
def test_the_users_choice_stands(name, monkeypatch):
    monkeypatch.setenv(name, "passive")
    assert openmp_environment("a.gguf", "beside=b.gguf") == {}
