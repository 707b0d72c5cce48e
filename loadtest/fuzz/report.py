"""What a run found: counts by kind and status, memory, and findings with the script for each."""

from __future__ import annotations

import re
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from bench.soak_report import Growth, ProcessMemory, growth
from flyspec.tables import markdown
from loadtest.fuzz.calls import Outcome, Script

MAX_GROWTH_MIB, MIN_SAMPLES = 32.0, 30
"""Growth of a warm process over the whole run that still counts as none."""
MAX_FINDINGS, MAX_FOUND = 20, 200
"""A run ends early with so many different findings, or so many of all together."""
_VALUES = re.compile(r"'[^']*'|\"[^\"]*\"|[-+\d.,e]*\d[-+\d.,e]*|\b(?:nan|inf)\b")


@dataclass
class Finding:
    """Something that must not happen, seen a `number` of times.

    `index` is that of the first script, `script` the smallest that shows it, if one alone does.
    """

    text: str
    index: int | None = None
    script: Script | None = None
    number: int = 0


@dataclass
class Report:
    """A run against one server. `errors` are the messages that it gave, without their values."""

    server: str
    seed: int
    messages: int = 0
    seconds: float = 0.0
    canaries: int = 0
    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    errors: set[str] = field(default_factory=set)
    findings: dict[str, Finding] = field(default_factory=dict)
    memory: list[ProcessMemory] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        """Count a call."""
        self.messages += outcome.sent
        self.kinds[outcome.script.kind][outcome.status] += 1
        if outcome.status != "OK":
            self.errors.add(_VALUES.sub("#", f"{outcome.status}: {outcome.details}"))

    def remember(self, service: str, mib: float) -> None:
        """Note the memory of a process."""
        self.memory.append(ProcessMemory(time.monotonic(), self.messages, service, 0, mib))

    def found(self, text: str, index: int | None = None, script: Script | None = None) -> Finding:
        """Note a finding; returns the one that is like it, if there is one."""
        key = f"{script.method.path if script else ''} {_VALUES.sub('#', text.splitlines()[0])}"
        finding = self.findings.setdefault(key, Finding(text, index, script))
        finding.number += 1
        return finding

    @property
    def enough(self) -> bool:
        """Whether there is no need to go on."""
        found = sum(finding.number for finding in self.findings.values())
        return len(self.findings) >= MAX_FINDINGS or found >= MAX_FOUND

    @property
    def growth(self) -> list[Growth]:
        """Growth of each process's memory while warm."""
        return growth(self.memory) if len(self.memory) >= MIN_SAMPLES else []

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings and all(g.share * g.mib <= MAX_GROWTH_MIB for g in self.growth)

    @property
    def statuses(self) -> Counter[str]:
        """Calls by status."""
        return sum(self.kinds.values(), Counter())

    def __str__(self) -> str:
        rate = self.messages / max(1e-9, self.seconds)
        lines = [
            f"## {self.server}, seed {self.seed}: {'passed' if self.passed else 'FAILED'}",
            "",
            f"{self.messages:,} messages in {self.statuses.total():,} calls; {self.seconds:,.0f} s "
            f"({rate:,.0f} messages/s); {len(self.errors)} different errors; canary right "
            f"{self.canaries:,} times",
            "",
        ]
        for g in self.growth:
            lines.append(f"memory of {g.service}: {g.mib:,.0f} MiB at the end; by its slope once "
                         f"warm {g.share * g.mib:+.1f} MiB over the run")  # fmt: skip
        rows = [
            (kind, ", ".join(f"{name} {n:,}" for name, n in of.most_common()), f"{of.total():,}")
            for kind, of in ({"all": self.statuses} | self.kinds).items()
        ]
        lines += ["", markdown(("what", "statuses", "calls"), rows, left=2)]
        for finding in self.findings.values():
            lines += ["", f"FAILED, {finding.number} times: {finding.text}"]
            if finding.index is not None:
                lines.append(f"again with: --server {self.server} --seed {self.seed} "
                             f"--only {finding.index}")  # fmt: skip
            lines += [str(finding.script)] if finding.script else []
        return "\n".join(lines)
