"""Detects lost ranks of a tensor-parallel target.

Every rank writes a report to the shared store twice per second; rank 0 reads all of them, the
others read rank 0's. A rank that is silent, or that has plans but finishes none, is lost. Silence
is counted in ticks of the watching thread, so that a pause of the whole machine does not count, and
only once all ranks are warm, since loading may keep a rank from reporting.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from flyspec.engine.parallel import IDLE_S, RankGroup

log = logging.getLogger(__name__)

REPORT_S = 0.5
TICK_S = 0.25


class Report(NamedTuple):
    """A rank's report: a counter that increases, and the number of finished plans."""

    beat: int
    finished: int

    def encode(self) -> str:
        return f"{self.beat} {self.finished}"

    @classmethod
    def decode(cls, text: bytes) -> Report:
        beat, finished = text.split()
        return cls(int(beat), int(finished))


_NO_REPORT = Report(0, 0)


@dataclass(slots=True)
class _Rank:
    report: Report = _NO_REPORT
    silent_s: float = 0.0
    stuck_s: float = 0.0


class Vigil:
    """Decides from reports and elapsed time whether a rank is lost. No clocks, no threads."""

    def __init__(
        self, ranks: Iterable[int], heartbeat_timeout_s: float, step_timeout_s: float
    ) -> None:
        self._ranks = {rank: _Rank() for rank in ranks}
        self._heartbeat_timeout_s = heartbeat_timeout_s
        self._step_timeout_s = step_timeout_s

    def observe(self, elapsed_s: float, reports: dict[int, Report], sent: int = 0) -> str | None:
        """Return why a rank is lost, or None. `sent`: plans that every rank should finish."""
        for rank, state in self._ranks.items():
            before, state.report = state.report, reports.get(rank, state.report)
            alive = state.report.beat != before.beat
            state.silent_s = 0.0 if alive else state.silent_s + elapsed_s
            moved = state.report.finished != before.finished
            idle = state.report.finished >= sent
            state.stuck_s = 0.0 if moved or idle else state.stuck_s + elapsed_s
            if state.silent_s > self._heartbeat_timeout_s:
                return f"rank {rank} has been silent for {state.silent_s:.1f} s"
            if state.stuck_s > self._step_timeout_s:
                return f"rank {rank} has not finished a step for {state.stuck_s:.1f} s"
        return None


class Watch:
    """The watching threads of a rank. `on_lost` is called with the reason and must not return."""

    def __init__(
        self,
        group: RankGroup,
        heartbeat_timeout_s: float,
        step_timeout_s: float,
        on_lost: Callable[[str], NoReturn],
    ) -> None:
        self._group, self._on_lost = group, on_lost
        rank, size = group.place.rank, group.place.size
        self._others = [0] if rank else list(range(1, size))
        self._vigil = Vigil(self._others, heartbeat_timeout_s, step_timeout_s)
        self._reports: dict[int, Report] = {}
        self._armed = False
        self._broken: str | None = None
        self._closed = threading.Event()

    def start(self) -> None:
        for target in (self._report, self._look):
            threading.Thread(target=target, name=f"rank{target.__name__}", daemon=True).start()
        if self._group.place.rank == 0:
            threading.Thread(target=self._keep_open, name="rank_idle", daemon=True).start()

    def arm(self) -> None:
        """Start detecting silence, now that all ranks are warm."""
        self._armed = True

    def close(self) -> None:
        """Stop watching, before the group disbands."""
        self._closed.set()

    def _report(self) -> None:
        """Write this rank's reports and read the others'."""
        try:
            store: Any = self._group.connect()
            keys = [str(rank) for rank in self._others]
            beat = 0
            while not self._closed.wait(REPORT_S):
                beat += 1
                report = Report(beat, self._group.finished)
                store.set(str(self._group.place.rank), report.encode())
                if store.check(keys):
                    texts = store.multi_get(keys)
                    for rank, text in zip(self._others, texts, strict=True):
                        self._reports[rank] = Report.decode(text)
        except Exception as error:
            self._broken = f"the ranks' store is unreachable: {' '.join(str(error).split()):.200}"

    def _look(self) -> None:
        """Look for a lost rank on every tick."""
        last = time.monotonic()
        while not self._closed.wait(TICK_S):
            now = time.monotonic()
            elapsed, last = min(now - last, 2 * TICK_S), now
            problem = self._broken
            if problem is None and self._armed:
                sent = 0 if self._group.place.rank else self._group.sent
                problem = self._vigil.observe(elapsed, dict(self._reports), sent)
            if problem and not self._closed.is_set():
                self._on_lost(problem)

    def _keep_open(self) -> None:
        """Send an idle plan whenever rank 0 has had nothing else to send."""
        sent = self._group.sent
        while not self._closed.wait(IDLE_S):
            if self._armed and self._group.sent == sent:
                try:
                    self._group.send_idle()
                except Exception as error:
                    self._broken = f"cannot send to the ranks: {error}"
            sent = self._group.sent
