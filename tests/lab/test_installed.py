"""Without the extra `lab`, a command says what to install."""

from __future__ import annotations

import pytest

from flyspec.errors import ConfigError
from flyspec_lab import lab


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    lab.check_installed("flyspec eval")
    there = lab.find_spec
    lab_extra = r"flyspec eval needs scikit-learn; install it with: pip install 'flyspec\[lab\]'"
    monkeypatch.setattr(lab, "find_spec", lambda name: None if name == "sklearn" else there(name))
    with pytest.raises(ConfigError, match=lab_extra):
        lab.check_installed("flyspec eval")
