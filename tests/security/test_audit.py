"""The audit fails loudly when it has no data."""

from __future__ import annotations

from deploy.audit import verdict

CLEAN = {"name": "a", "version": "1", "vulns": []}
BAD = {"name": "b", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
SKIPPED = {"name": "c", "skip_reason": "not found"}


def test_all_looked_up_and_none_vulnerable():
    assert verdict({"dependencies": [CLEAN, CLEAN]}, 2) == (
        0,
        ["2 versions, no known vulnerability"],
    )


def test_a_vulnerability_is_named():
    code, lines = verdict({"dependencies": [CLEAN, BAD]}, 2)
    assert code == 1
    assert lines == ["b 2: CVE-1; fixed in 3", "FAILED: 1 known vulnerabilities"]


def test_what_was_not_looked_up_is_a_failure():
    for document, missing in (
        ({"dependencies": [CLEAN, SKIPPED]}, 1),
        ({"dependencies": [SKIPPED, SKIPPED]}, 2),
        ({"dependencies": []}, 2),
        ({}, 2),
    ):
        code, lines = verdict(document, 2)
        assert code == 2
        assert f"FAILED: {missing} of 2 versions could not be looked up" in lines[-1]
    code, lines = verdict({"dependencies": [BAD, SKIPPED]}, 2)
    assert code == 2
    assert "CVE-1" in lines[0]
