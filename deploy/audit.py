"""`make audit`: known vulnerabilities of the versions in constraints.txt.

pip-audit ends well when it could look up nothing. This ends with 0 only if every version was looked
up and none has a known vulnerability; with 1 if some has one, with 2 if some was not looked up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PINS = Path(__file__).resolve().parent.parent / "constraints.txt"


def main(arguments: list[str]) -> int:
    """Ask pip-audit, with further arguments such as `-s osv`, and say what it found."""
    command = [sys.executable, "-m", "pip_audit", "-r", str(PINS), "--no-deps", "--disable-pip"]
    done = subprocess.run(
        [*command, "-f", "json", "--progress-spinner", "off", *arguments],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    try:
        document = json.loads(done.stdout)
    except ValueError:
        print(f"audit: pip-audit said nothing that can be read; its exit code is {done.returncode}")
        return 2
    pins = [line for line in PINS.read_text().splitlines() if "==" in line]
    code, lines = verdict(document, len(pins))
    print("\n".join(f"audit: {line}" for line in lines))
    return code


def verdict(document: dict[str, Any], num_pins: int) -> tuple[int, list[str]]:
    """The exit code and what to say of pip-audit's JSON document on so many pins."""
    found = document.get("dependencies", [])
    looked_up = [d for d in found if "skip_reason" not in d and "vulns" in d]
    lines = [
        f"{d['name']} {d['version']}: {v['id']}; fixed in {', '.join(v['fix_versions']) or 'none'}"
        for d in looked_up
        for v in d["vulns"]
    ]
    missing = num_pins - len(looked_up)
    if missing > 0:
        reasons = sorted({str(d["skip_reason"]) for d in found if "skip_reason" in d})
        lines.append(
            f"FAILED: {missing} of {num_pins} versions could not be looked up, so nothing is known "
            f"of them; the first reason: {reasons[0] if reasons else 'none given'}"
        )
        return 2, lines
    if lines:
        return 1, [*lines, f"FAILED: {len(lines)} known vulnerabilities"]
    return 0, [f"{num_pins} versions, no known vulnerability"]


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
