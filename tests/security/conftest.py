"""Two authorities: ours, and one that nobody trusts."""

from __future__ import annotations

import pytest

from tests.security.authority import Authority


@pytest.fixture
def ours(tmp_path):
    return Authority(tmp_path, "ours")


@pytest.fixture
def others(tmp_path):
    return Authority(tmp_path, "others")
