"""Findings of a run with the script for each, calls by kind and status, and memory."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from flyspec.tables import FittedTable, make_table
from flyspec_lab.report import Plot, Report
from loadtest.fuzz.calls import CallOutcome, Script
from loadtest.report import VERSION, checked_report
from loadtest.sampler import Sampler

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
class FuzzResult:
    """A run against one server. `errors` are the messages that it gave, without their values."""

    server: str
    seed: int
    memory: Sampler
    messages: int = 0
    seconds: float = 0.0
    canaries: int = 0
    kinds: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    errors: set[str] = field(default_factory=set)
    findings: dict[str, Finding] = field(default_factory=dict)

    def count(self, outcome: CallOutcome) -> None:
        """Count a call."""
        self.messages += outcome.sent
        self.kinds[outcome.script.kind][outcome.status] += 1
        if outcome.status != "OK":
            self.errors.add(_VALUES.sub("#", f"{outcome.status}: {outcome.details}"))

    def found(self, text: str, index: int | None = None, script: Script | None = None) -> Finding:
        """Note a finding; returns the one that is like it, if there is one."""
        key = f"{script.method.path if script else ''} {_VALUES.sub('#', text.splitlines()[0])}"
        finding = self.findings.setdefault(key, Finding(text, index, script))
        finding.number += 1
        return finding

    @property
    def enough(self) -> bool:
        """True if there is no need to go on."""
        found = sum(finding.number for finding in self.findings.values())
        return len(self.findings) >= MAX_FINDINGS or found >= MAX_FOUND

    @property
    def statuses(self) -> Counter[str]:
        """Calls by status."""
        return sum(self.kinds.values(), Counter())

    @property
    def passed(self) -> bool:
        """True if nothing was found."""
        return all(check["passed"] for check in self.checks())

    def checks(self) -> list[dict[str, Any]]:
        """One for each finding, and one for the memory of each process."""
        checks = []
        for finding in self.findings.values():
            lines = [f"({finding.number:,}x) {finding.text}"]
            if finding.index is not None:
                lines.append(f"again with: --server {self.server} --seed {self.seed} "
                             f"--only {finding.index}")  # fmt: skip
            lines += [str(finding.script)] if finding.script else []
            checks.append((self.server, False, "\n".join(lines)))
        if not checks:
            checks.append((self.server, True, f"nothing found in {self.messages:,} messages"))
        growth = self.memory.growth(0, self.seconds)
        for g in growth if len(self.memory.memory) >= MIN_SAMPLES * len(growth) else ():
            mib = g.share * g.mib
            said = f"{g.mib:,.0f} MiB at the end; once warm, {mib:+.1f} MiB over the run"
            checks.append((f"{self.server}, memory of {g.service}", mib <= MAX_GROWTH_MIB, said))
        return [{"name": name, "passed": passed, "said": said} for name, passed, said in checks]

    def document(self) -> dict[str, Any]:
        """The result for JSON."""
        return {
            "server": self.server, "messages": self.messages, "seconds": self.seconds,
            "canaries": self.canaries, "errors": sorted(self.errors),
            "kinds": self.kinds, "memory": self.memory.memory_document(),
        }  # fmt: skip


def fuzz_report(results: Sequence[FuzzResult], options: dict[str, Any]) -> Report:
    """Return the report on runs with these options."""
    checks = [check for result in results for check in result.checks()]
    document: dict[str, Any] = {
        "version": VERSION,
        "passed": all(check["passed"] for check in checks),
        "servers": [result.document() for result in results],
        "checks": checks,
        "warnings": [],
        "options": options,
    }
    found = document["servers"]
    return checked_report(document, "flyspec fuzz", [*_tables(found), _plot(found)])


def _tables(found: Sequence[dict[str, Any]]) -> list[FittedTable]:
    servers: list[list[str]] = []
    calls: list[list[str]] = []
    for r in found:
        numbers = {kind: sum(of.values()) for kind, of in r["kinds"].items()}
        servers.append([r["server"], *(f"{number:,.0f}" for number in (
            r["messages"], sum(numbers.values()), r["messages"] / max(1e-9, r["seconds"]),
            r["canaries"], len(r["errors"]),
        ))])  # fmt: skip
        for kind, of in r["kinds"].items():
            statuses = ", ".join(f"{name} {n:,}" for name, n in Counter(of).most_common())
            calls.append([r["server"], kind, statuses, f"{numbers[kind]:,}"])
    columns = ["server", "messages", "calls", "messages/s", "canary right", "different errors"]
    return [
        make_table(columns, servers, "servers"),
        make_table(["server", "what", "statuses", "calls"], calls, "calls", left=3),
    ]


def _plot(servers: Sequence[dict[str, Any]]) -> Plot:
    """Return a plot of the memory of each process, by the server that was attacked."""

    def draw(figure: Any) -> None:
        axes = figure.subplots(1, len(servers), squeeze=False, sharey=True)[0]
        for ax, r in zip(axes, servers, strict=True):
            for service, samples in r["memory"].items():
                ax.plot(samples["seconds"], samples["mib"], label=service)
            ax.set(title=r["server"], xlabel="seconds", ylim=(0, None))
        axes[0].set_ylabel("MiB")
        axes[-1].legend()

    return Plot("memory", "Resident memory of processes.", draw, (2.6 * len(servers), 3.0))
