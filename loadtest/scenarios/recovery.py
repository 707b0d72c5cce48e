"""The time for which streams stall when a service is killed or hangs."""

from __future__ import annotations

import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Annotated, Any

from loadtest.goals import Check
from loadtest.scenarios.base import (
    DRAFTER,
    FIXED,
    TARGET,
    Scenario,
    ScenarioVerdict,
    UserFlags,
    own_flag,
)
from loadtest.summary import PhaseResult
from loadtest.work import Closed, LoadPhase, Text

ALLOWANCE_S = 1.0
"""Cost of a target's absence beyond its duration that is allowed."""
HOLD_S = 3.0
FAULT_AT = 0.7
"""The fault comes after this share of a phase; streams begun before continue after its end."""


@dataclass(frozen=True, slots=True)
class Case:
    """A service that is killed or hangs."""

    name: str
    service: str
    kills: bool


CASES = (
    Case("drafter killed", DRAFTER, True),
    Case("drafter hangs", DRAFTER, False),
    Case("target killed and restarted", TARGET, True),
    Case(f"target hangs for {HOLD_S:g} s", TARGET, False),
)


# fmt: off
@dataclass(frozen=True)
class RecoveryFlags(UserFlags):
    """The streams and the installation."""

    draft_timeout: Annotated[float, own_flag(
        "The installation's --draft-timeout-s, which bounds the loss of a drafter.",
    )] = 1.0
    # fmt: on


class KillRecovery(Scenario[RecoveryFlags]):
    """Long texts with rule exact; in each phase a service is killed, or stopped so that it hangs.

    Measures each stream's longest pause from then on, minus its median pause before. The loss of a
    drafter may cost --draft-timeout plus the time to open that many sessions, which is measured
    first; the loss of a target may cost the time it was away plus 1 s. Every text must equal the
    one generated without faults. Needs --watch draft=PID and verify=PID, and something that
    restarts killed services.
    """

    name = "recovery"
    about = "Services are killed or hang during streams; measures how long the streams stall."
    needs_admin = True
    load = replace(
        FIXED,
        seconds=120.0,
        requests=replace(FIXED.requests, num_speculative_tokens=15, max_tokens=800),
    )
    defaults = RecoveryFlags()

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.faults: dict[str, tuple[float, float]] = {}

    def phases(self, done: Sequence[PhaseResult]) -> Iterator[LoadPhase]:
        texts = self.exact_texts(self.users)
        streams, variants = Closed(self.users), self.plain_variants
        rng, length = random.Random(0), self.options.max_tokens or 1
        brief = replace(self.options, max_tokens=2, num_speculative_tokens=1)
        yield LoadPhase(
            "opening", streams, 0.01, variants, judged=False, texts=[
                Text(rng.choices(range(8, self.world.vocab_size), k=length), brief)
                for _ in range(self.users)
            ],
        )  # fmt: skip
        seconds = self.seconds / len(CASES)
        for case in CASES:
            yield LoadPhase(case.name, streams, seconds, variants, texts=texts, judged=False,
                            meanwhile=partial(self._hurt, case, FAULT_AT * seconds))  # fmt: skip

    def _hurt(self, case: Case, after_s: float) -> None:
        time.sleep(after_s)
        if case.kills:
            self.faults[case.name] = self.world.kill(case.service)
            return
        pid = self.world.process_of(case.service).process.process_id
        began = self.world.control.now()
        os.kill(pid, signal.SIGSTOP)
        self.world.note(f"{case.service} hangs")
        try:
            time.sleep(HOLD_S)
        finally:
            os.kill(pid, signal.SIGCONT)
            self.world.note(f"{case.service} continues")
        self.faults[case.name] = began, self.world.control.now()

    def judge(self, phases: Mapping[str, PhaseResult]) -> ScenarioVerdict:
        opened = [r.ended - r.sent for r in self.world.control.records if r.phase == "opening"]
        rows = [self._row(case, *self.faults[case.name], max(opened, default=0.0))
                for case in CASES if case.name in self.faults]  # fmt: skip
        return ScenarioVerdict({"cases": rows}, checks=[
            *(Check(row["case"], row["streams"] > 0 and row["added max s"] <= row["bound s"],
                    f"a stream stood still for {row['added max s']:.2f} s, "
                    f"bound {row['bound s']:.2f} s ({row['bound of']})") for row in rows),
            Check("cases", len(rows) == len(CASES), f"{len(rows)} of {len(CASES)}"),
            *self.same_texts(),
        ])  # fmt: skip

    def _row(self, case: Case, hurt: float, healed: float, open_s: float) -> dict[str, Any]:
        added, recoveries = list[float](), Counter[str]()
        for stream in self.world.control.records:
            if stream.phase == case.name and stream.sent < hurt < stream.ended:
                gaps = list(pairwise(stream.arrivals))
                recoveries.update(stream.recoveries)
                if before := [b - a for a, b in gaps if b <= hurt]:
                    longest = max((b - a for a, b in gaps if b > hurt), default=0.0)
                    added.append(longest - statistics.median(before))
        bound = self.own.draft_timeout + open_s
        bound_of = f"deadline {self.own.draft_timeout:g} s, opening {open_s:.2f} s"
        if case.service == TARGET:
            bound = healed - hurt + ALLOWANCE_S
            bound_of = f"{healed - hurt:.2f} s without it, {ALLOWANCE_S:g} s more"
        told = (f"{n} {kind.lower().replace('_', ' ')}" for kind, n in recoveries.items())
        return {
            "case": case.name,
            "streams": len(added),
            "added p50 s": statistics.median(added) if added else 0.0,
            "added max s": max(added, default=0.0),
            "bound s": bound,
            "bound of": bound_of,
            "recoveries": ", ".join(told),
        }
