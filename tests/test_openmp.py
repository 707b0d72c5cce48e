"""OpenMP's threads wait briefly where llama.cpp runs a model, unless the user chose otherwise."""

from __future__ import annotations

import pytest

from flyspec.cli.service import child_environment
from flyspec.openmp import POLICY, SPINS, openmp_environment


@pytest.fixture(autouse=True)
def _nothing_chosen(monkeypatch):
    for name in (SPINS, POLICY):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("models", "is_brief"),
    [([], False), (["models/a", ""], False), (["a.gguf"], True), (["models/a", "b.gguf"], True)],
)
def test_waits_are_brief_if_a_model_is_a_gguf_file(models, is_brief):
    assert (SPINS in openmp_environment(models)) == is_brief
    assert (SPINS in child_environment(1, models)) == is_brief


@pytest.mark.parametrize("name", [SPINS, POLICY])
def test_the_users_choice_stands(name, monkeypatch):
    monkeypatch.setenv(name, "passive")
    assert openmp_environment(["a.gguf"]) == {}
    assert child_environment(1, ["a.gguf"])[name] == "passive"
