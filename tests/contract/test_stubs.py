"""The committed stubs are what the protos generate."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_committed_stubs_equal_regenerated_ones(tmp_path, monkeypatch):
    pytest.importorskip("grpc_tools")
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=":")
    monkeypatch.syspath_prepend(str(ROOT / "protos"))
    import generate

    generate.generate(tmp_path)
    fresh = {p.name: p.read_text() for p in (tmp_path / "flyspec/v1").iterdir() if p.is_file()}
    committed = {
        p.name: p.read_text()
        for p in (ROOT / "flyspec/v1").iterdir()
        if p.suffix in (".py", ".pyi")
    }
    assert sorted(committed) == sorted(fresh)
    changed = [name for name in fresh if fresh[name] != committed[name]]
    assert not changed, f"run `make stubs`: {changed}"
