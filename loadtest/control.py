"""The state that users share: the current phase, the next request, the records of all requests.

Does not use locust: events are those of the standard library, which gevent makes cooperative.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator

from flyspec.client import Prompt
from loadtest.record import Record
from loadtest.transport import Transport
from loadtest.work import Job, LoadPhase, Open


class Control:
    """The state of a test. Users ask `next_job`, make the request and hand in its record."""

    def __init__(
        self,
        transport: Transport,
        next_prompt: Callable[[], Prompt],
        seed: int,
        keep_records: bool = True,
    ) -> None:
        self.transport = transport
        self._keep_records = keep_records
        self.records: list[Record] = []
        self.rng = random.Random(seed)
        self._seed = seed
        self.in_flight = 0
        self.opened = threading.Event()
        """Set while a phase is on: requests may begin."""
        self.phase: LoadPhase | None = None
        self.phase_began = 0.0
        self.next_prompt = next_prompt
        self._text_numbers = itertools.count()
        self._begin = time.perf_counter()

    def now(self) -> float:
        """Seconds since the test began."""
        return time.perf_counter() - self._begin

    def open_phase(self, phase: LoadPhase) -> None:
        self.phase, self.phase_began = phase, self.now()
        self.opened.set()

    def arrivals(self, phase: LoadPhase, load: Open) -> Iterator[float]:
        """Return the times of an open phase's requests, the same for the same seed."""
        return load.arrivals(phase.seconds, random.Random(f"{self._seed} {phase.name}"))

    def add(self, record: Record) -> None:
        if self._keep_records:
            self.records.append(record)

    def close_phase(self) -> None:
        self.opened.clear()

    def next_job(self, planned: float | None = None) -> Job:
        """Return the next request, due now or at `planned`."""
        assert self.phase is not None, "no phase is on"
        phase, rng, text = self.phase, self.rng, None
        (variant,) = rng.choices(phase.variants, [v.weight for v in phase.variants])
        if phase.texts:
            text = phase.texts[next(self._text_numbers) % len(phase.texts)]
            prompt, options = text.prompt, text.options
        else:
            prompt, options = self.next_prompt(), variant.options
            if variant.vary is not None:
                options = variant.vary(rng, options)
        leaves = phase.cancelled > 0 and rng.random() < phase.cancelled
        return Job(
            phase=phase.name,
            variant=variant.name,
            prompt=prompt,
            options=options,
            planned=self.now() if planned is None else planned,
            leave_after_s=rng.expovariate(1 / phase.cancel_after_s) if leaves else None,
            text=text,
        )
