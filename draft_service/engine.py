"""The engine: one thread that owns the draft model and its cache; everyone else only queues.

Each turn of its loop takes the next step of every proposal that is under way, of long ones a chunk,
and runs them as one batch. Imports no torch: model and cache are reached through the runner.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from time import perf_counter_ns
from typing import TYPE_CHECKING, Protocol

from draft_service.proposal import Proposal, SessionState
from flyspec.engine.scheduler import Budget, Pieces, Step, allot
from flyspec.errors import FlyspecError, UnavailableError

if TYPE_CHECKING:
    from flyspec.engine.runner import Draw, Drawn

log = logging.getLogger(__name__)


class Runner(Protocol):
    """What the engine needs of `flyspec.engine.runner.ModelRunner`."""

    def draw(self, draws: Sequence[Draw]) -> list[Drawn]:
        """The tokens drawn from each step's rows, read from the device."""


class Running:
    """A proposal under way: its next draw, and what the model still has to run for it."""

    __slots__ = ("draw", "pieces", "proposal")

    def __init__(self, proposal: Proposal, draw: Draw) -> None:
        self.proposal = proposal
        self.go_on(draw)

    def go_on(self, draw: Draw) -> None:
        """Take the next draw."""
        self.draw, self.pieces = draw, Pieces(draw.step)

    def take(self, count: int) -> Draw:
        """The next `count` tokens: the draw itself, or a piece that only fills the cache."""
        step: Step = self.pieces.take(count)
        return self.draw._replace(
            step=step, sampling=self.draw.sampling if step.num_logits else None
        )


class Engine:
    """Runs proposals over a model.

    `prepare` runs first, in the engine's thread: thread settings, warm-up. `on_step` is told of
    every step there: its time in ns, its sessions, its tokens.
    """

    def __init__(
        self,
        runner: Runner,
        prepare: Callable[[], None] = lambda: None,
        budget: Budget | None = None,
        on_step: Callable[[int, int, int], None] = lambda *_: None,
    ) -> None:
        self._runner, self._prepare, self._on_step = runner, prepare, on_step
        self._budget = budget or Budget()
        self._commands: SimpleQueue[Proposal | SessionState | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._main, name="draft-engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._ready: asyncio.Future[None] | None = None

    async def start(self) -> None:
        """Start the thread and wait until it is prepared; raises what `prepare` raises."""
        self._loop = asyncio.get_running_loop()
        self._ready = self._loop.create_future()
        self._thread.start()
        await self._ready

    async def stop(self) -> None:
        """End the thread within one step; proposals under way fail with `UnavailableError`."""
        if self._thread.is_alive():
            self._commands.put(None)
            await asyncio.to_thread(self._thread.join)

    def submit(self, proposal: Proposal) -> None:
        """Queue a proposal. Its session has no other under way."""
        self._commands.put(proposal)

    def close(self, state: SessionState) -> None:
        """Queue the end of a session: its proposal stops before the next step, its slot is free."""
        self._commands.put(state)

    def _main(self) -> None:
        loop, ready = self._loop, self._ready
        assert loop is not None
        assert ready is not None
        try:
            self._prepare()
        except Exception as error:
            loop.call_soon_threadsafe(ready.set_exception, error)
            return
        loop.call_soon_threadsafe(ready.set_result, None)
        self._run()

    def _run(self) -> None:
        """Drive all proposals under way, one step each a turn; block when there is none."""
        active: dict[SessionState, Running] = {}
        commands = self._commands
        while True:
            while not active or not commands.empty():
                command = commands.get()
                if command is None:
                    for running in active.values():
                        _fail(
                            running.proposal, UnavailableError("the draft service is shutting down")
                        )
                    return
                if isinstance(command, SessionState):
                    _close(command, active.pop(command, None))
                    continue
                try:
                    draw = command.start()
                except Exception as error:
                    _fail(command, error)
                    continue
                if draw is not None:
                    active[command.state] = Running(command, draw)
            self._turn(active)

    def _turn(self, active: dict[SessionState, Running]) -> None:
        """Run the next step, or a piece of it, of the proposals under way as one batch."""
        under_way = list(active.values())
        counts = allot([running.pieces for running in under_way], self._budget)
        chosen = [(r, r.take(n)) for r, n in zip(under_way, counts, strict=True) if n]
        began = perf_counter_ns()
        results = self._draw([draw for _, draw in chosen])
        elapsed = perf_counter_ns() - began
        self._on_step(elapsed, len(chosen), sum(counts))
        for (running, _), drawn in zip(chosen, results, strict=True):
            proposal = running.proposal
            proposal.model_ns += elapsed
            # Whoever ran goes to the end of the line.
            del active[proposal.state]
            try:
                if isinstance(drawn, Exception):
                    raise drawn
                if not running.pieces.remaining:
                    draw = proposal.resume(drawn)
                    if draw is None:
                        continue
                    running.go_on(draw)
                active[proposal.state] = running
            except Exception as error:
                _fail(proposal, error)

    def _draw(self, draws: Sequence[Draw]) -> Sequence[Drawn | Exception]:
        """What each draw gives; where the batch fails, each gets a try of its own."""
        try:
            return self._runner.draw(draws)
        except Exception as error:
            log.debug("a batch of %d failed", len(draws), exc_info=error)
            if len(draws) == 1:
                return [error]
        return [drawn for draw in draws for drawn in self._draw([draw])]


def _fail(proposal: Proposal, error: Exception) -> None:
    """Report an error to the proposal's session; a bug is logged by the RPC layer there."""
    if not isinstance(error, FlyspecError):
        log.debug("a proposal failed", exc_info=error)
    # The event loop may be gone while the process ends.
    with contextlib.suppress(RuntimeError):
        proposal.fail(error)


def _close(state: SessionState, running: Running | None) -> None:
    """End a session, in mid-proposal if there is one."""
    try:
        if running is not None:
            running.proposal.cancel()
        state.close()
    except Exception:
        log.exception("a session could not be closed")
