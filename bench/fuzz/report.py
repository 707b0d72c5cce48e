"""What a run found: counts by kind and status, complaints, and the script that shows each best."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

from bench.fuzz.script import CallOutcome, Script
from flyspec.tables import markdown
from loadtest.sampler import Growth, ProcessMemory, growth

MAX_GROWTH_MIB = 32.0
"""Most growth while warm, over the whole run, that counts as none."""


@dataclass
class Complaint:
    """Something that must not be. `script` is None if it is nobody's in particular."""

    text: str
    index: int | None = None
    script: Script | None = None
    smallest: Script | None = None


@dataclass
class FuzzReport:
    """A run against one server."""

    server: str
    seed: int
    messages: int = 0
    streams: int = 0
    connections: int = 0
    seconds: float = 0.0
    canaries: int = 0
    answers: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    complaints: list[Complaint] = field(default_factory=list)
    left: dict[str, int] = field(default_factory=dict)
    memory: list[ProcessMemory] = field(default_factory=list)

    def count(self, outcome: CallOutcome) -> None:
        """Count a call that was played."""
        self.streams += 1
        self.messages += outcome.sent
        self.answers += outcome.answers
        self.statuses[outcome.status] += 1
        self.kinds[outcome.script.kind][outcome.status] += 1

    @property
    def growth(self) -> list[Growth]:
        """Memory's growth while warm, of each process."""
        return growth(self.memory) if len(self.memory) >= 30 else []

    @property
    def grown(self) -> list[Growth]:
        """Where it is more than nothing."""
        return [g for g in self.growth if g.share * g.mib > MAX_GROWTH_MIB]

    @property
    def passed(self) -> bool:
        """Whether the server stood it."""
        return not (self.complaints or self.grown or any(self.left.values()))

    def __str__(self) -> str:
        statuses = "; ".join(f"{name} {n:,}" for name, n in self.statuses.most_common())
        lines = [
            f"## {self.server}, seed {self.seed}: {'passed' if self.passed else 'FAILED'}",
            "",
            f"{self.messages:,} messages in {self.streams:,} calls and {self.connections:,} raw "
            f"connections, {self.seconds:,.0f} s ({self.messages / max(1e-9, self.seconds):,.0f} "
            f"messages/s); {self.answers:,} answers; canary right {self.canaries:,} times",
            "",
            f"calls by status: {statuses}",
            "",
            "sessions left: " + (", ".join(f"{k} {v}" for k, v in self.left.items()) or "unknown"),
        ]
        for g in self.growth:
            lines.append(
                f"memory of {g.service}: {g.mib:,.0f} MiB at the end; by its slope since it was "
                f"warm {g.share * g.mib:+.1f} MiB over the run"
            )
        rows = [
            (kind, ", ".join(f"{name} {n:,}" for name, n in of.most_common()), f"{of.total():,}")
            for kind, of in sorted(self.kinds.items(), key=lambda item: -item[1].total())
        ]
        lines += ["", markdown(("what", "statuses", "calls"), rows, left=2)]
        for complaint in self.complaints[:10]:
            where = "" if complaint.index is None else f" --only {complaint.index}"
            lines += ["", f"FAILED: {complaint.text}"]
            if complaint.index is not None:
                lines.append(f"again with: --server {self.server} --seed {self.seed}{where}")
            if script := complaint.smallest or complaint.script:
                lines.append(str(script))
        if len(self.complaints) > 10:
            lines.append(f"... and {len(self.complaints) - 10} more")
        return "\n".join(lines)
