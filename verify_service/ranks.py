"""Starts the ranks of a tensor-parallel target, and ends the service when one of them is lost.

The service process is rank 0. On a single host it starts the others as children (`rank_process`).
If torchrun's variables are in the environment, all ranks were started externally and this process
joins them.

Every rank writes a report to the shared store twice per second; rank 0 reads all of them, the
others read rank 0's. A rank that is silent, or that has plans but finishes none, is lost. Silence
is counted in ticks of the watching thread, so that a pause of the whole machine does not count, and
only once all ranks are warm, since loading may keep a rank from reporting.

A lost rank ends all ranks, which would otherwise wait for it in the middle of a forward. The exit
code is then `EXIT_LOST_RANK`, and the service's supervisor restarts it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import flyspec
from flyspec.config import VerifySettings
from flyspec.engine import threads
from flyspec.engine.cache_size import check_fits
from flyspec.engine.configuration import read_config
from flyspec.engine.loading import LoadedModel, load_model
from flyspec.engine.model import Model
from flyspec.engine.native.choice import choose_model
from flyspec.engine.parallel import (
    IDLE_S,
    LeadRunner,
    Place,
    RankGroup,
    place_from_environment,
    rank_device,
    weight_bytes,
)
from flyspec.engine.supported import check_tensor_parallel
from flyspec.errors import ConfigError
from flyspec.model_files import is_gguf
from flyspec.serving import settle_memory

log = logging.getLogger(__name__)

REPORT_S = 0.5
TICK_S = 0.25
LOOPBACK = "127.0.0.1"
EXIT_LOST_RANK = os.EX_TEMPFAIL
"""Temporary failure (sysexits.h): restart the service."""
EXIT_GRACE_S = 5.0
_LAST_WORDS_S = 1.0
_POLL_S = 0.1
_COMPARED_DIGITS = 15
"""Leading digits of weights fingerprints compared, as many as ranks can exchange as a number."""


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


class Ranks:
    """Starts, joins, watches and stops the other ranks; used by rank 0."""

    def __init__(self, place: Place, settings: VerifySettings) -> None:
        self.place, self._settings = place, settings
        self.group: RankGroup | None = None
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        self._watch: Watch | None = None
        self._ending = threading.Lock()
        self._leading = self._stopped = False

    def start(self) -> RankGroup:
        """Start the ranks of this host unless started externally, and connect to all ranks.

        Raises `ConfigError`.
        """
        device = rank_device(self._settings.device, self.place)
        listener = None
        if self.place.port == 0:
            listener = socket.create_server((LOOPBACK, 0))
            self.place = self.place._replace(port=listener.getsockname()[1])
            self._start_children()
        self.group = RankGroup.join(self.place, device, listener)
        self._watch = _watch(self.group, self._settings, self.end)
        log.info("%d ranks connected at %s:%d", self.place.size, self.place.host, self.place.port)
        return self.group

    def lead(self, runner: Model) -> None:
        """Wait until all ranks are warm, then have them follow `runner` and watch them."""
        assert self.group is not None
        assert isinstance(runner, LeadRunner)
        assert self._watch is not None
        self.group.wait_for_all()
        runner.lead(self.group, self.failed)
        self._watch.arm()
        self._leading = True

    def stop(self) -> None:
        """Stop all ranks, gracefully if they are following; kill those that do not exit."""
        self._stopped = True
        if self._watch is not None:
            self._watch.close()
        if self._leading:
            deadline = time.monotonic() + EXIT_GRACE_S
            # A rank that does not answer must not delay shutdown.
            parting = threading.Thread(target=self._part, name="rank_part", daemon=True)
            parting.start()
            parting.join(EXIT_GRACE_S)
            for child in self._children.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(max(0.0, deadline - time.monotonic()))
        self._kill()

    def end(self, reason: str, code: int = EXIT_LOST_RANK) -> NoReturn:
        """End this process and all ranks at once; some thread may be waiting for a lost rank."""
        with self._ending:
            log.critical("%s; exiting so that the service is restarted", reason)
            self._kill()
            os._exit(code)

    def _part(self) -> None:
        assert self.group is not None
        with contextlib.suppress(Exception):
            self.group.stop()
            self.group.leave()

    def _kill(self) -> None:
        for child in self._children.values():
            if child.poll() is None:
                child.kill()

    def failed(self, error: Exception) -> NoReturn:
        """End the service after a failed forward: the ranks are out of step, or one is lost.

        A `ConfigError` is raised instead.
        """
        # If a rank ended, that is the cause; its watching thread is about to report it.
        time.sleep(_LAST_WORDS_S)
        if isinstance(error, ConfigError):
            raise error
        self.end(f"a step failed: {_in_a_line(error)}")

    def _start_children(self) -> None:
        root = str(Path(flyspec.__file__).resolve().parent.parent)
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        settings = self._settings.model_dump_json(exclude={"ready_fd"}).encode() + b"\n"
        # Processes of one host need not be reachable from others.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform == "linux" else "lo0")
        for rank in range(1, self.place.size):
            place = self.place._replace(rank=rank, local_rank=rank)
            child = subprocess.Popen(
                [sys.executable, "-P", "-m", "verify_service.rank_process"],
                stdin=subprocess.PIPE,
                env={**os.environ, **place.environment(), "PYTHONPATH": path, "TQDM_DISABLE": "1"},
            )
            self._children[rank] = child
            log.info("rank %d is process %d", rank, child.pid)
            assert child.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended; `_await_children` reports it
                child.stdin.write(settings)
                child.stdin.flush()
        threading.Thread(target=self._await_children, name="rank_children", daemon=True).start()

    def _await_children(self) -> None:
        """End all ranks when a child ends on its own."""
        while not self._stopped:
            for rank, child in self._children.items():
                code = child.poll()
                if code is None or self._stopped:
                    continue
                how = f"with code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"
                # 2: it could not start and has printed why.
                self.end(f"rank {rank} ended {how}", 2 if code == 2 else EXIT_LOST_RANK)
            time.sleep(_POLL_S)


def find_place(settings: VerifySettings) -> Place | None:
    """Return this process's place among the ranks; None for a target in one process.

    Port 0 means that the other ranks are yet to be started. Raises `ConfigError`.
    """
    size = settings.tensor_parallel_size
    place = place_from_environment(os.environ)
    if place is not None and size not in (1, place.size):
        raise ConfigError(
            f"--tensor-parallel-size {size} contradicts WORLD_SIZE={place.size} in the "
            "environment; set only one of them"
        )
    if place is None and size > 1:
        place = Place(0, size, 0, size, LOOPBACK, 0)
    if place is not None:
        if settings.device == "cpu":
            # transformers uses a GPU for its mesh if it sees one.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        check_tensor_parallel(settings.model, read_config(settings.model)[1], place.size)
    return place


def set_threads(settings: VerifySettings, place: Place | None) -> None:
    """Limit this thread, and those that it starts, to the CPU threads of its rank."""
    threads.set_threads(settings.threads, 1 if place is None else place.local_size)


def load(settings: VerifySettings, group: RankGroup | None) -> tuple[LoadedModel, Model]:
    """Load the target and its runner, in a group a `LeadRunner`. Raises `ConfigError`.

    Each rank loads its share. All must have the same slots and run the same forwards.
    """
    if is_gguf(settings.model):
        from flyspec.engine.llama_cpp.loading import load as load_gguf  # needs an extra

        return load_gguf(settings)
    device, size = (str(group.device), group.place.size) if group else (settings.device, 1)
    check = partial(check_fits, settings)
    identify = group is None or group.place.local_rank == 0  # once per host
    loaded = load_model(
        settings.model,
        device,
        settings.dtype,
        settings.max_model_len,
        size,
        check,
        identify,
        settings.served_model_name,
    )
    if not group:
        return loaded, choose_model(loaded, settings, settings.batch_invariant)
    digits = loaded.info.weights_fingerprint[:_COMPARED_DIGITS]
    if not group.all_equal(int(digits, 16) if digits else None):
        raise ConfigError(
            f"--model {settings.model}: the ranks' hosts have different weights under that name; "
            "give all of them the same checkpoint"
        )
    own, total = weight_bytes(loaded.model)
    log.info("rank %d of %d holds %.1f of %.1f MB of weights (%.1f %%)", group.place.rank,
             size, own / 1e6, total / 1e6, 100 * own / total)  # fmt: skip
    return loaded, LeadRunner.planned(loaded, settings, size, settings.batch_invariant, group.least)


def follow(settings: VerifySettings, place: Place, parent: int | None = None) -> None:
    """Run a rank other than 0 until rank 0 stops. Raises `ConfigError` if it cannot start.

    `parent` is the process id of rank 0 if rank 0 started this process.
    """

    def end(reason: str) -> NoReturn:
        log.critical("%s; this rank exits", reason)
        if parent is not None and os.getppid() == parent:
            # Its clients are waiting, and whatever stopped it keeps it from noticing.
            os.kill(parent, signal.SIGKILL)
        os._exit(EXIT_LOST_RANK)

    set_threads(settings, place)
    group = RankGroup.join(place, rank_device(settings.device, place))
    # Rank 0 receives the signal, drains, and then stops the others.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    watch = _watch(group, settings, end)
    try:
        _, runner = load(settings, group)
        assert isinstance(runner, LeadRunner)
        runner.warm_up()
        settle_memory()
        group.wait_for_all()
        watch.arm()
        group.follow(runner, on_stop=watch.close)
    except Exception as error:
        # If another rank was lost, that is the cause; rank 0 is about to report it.
        time.sleep(2 * _LAST_WORDS_S)
        if isinstance(error, ConfigError):
            raise
        log.critical("%s; this rank exits", _in_a_line(error))
        os._exit(EXIT_LOST_RANK)
    group.leave()


def _in_a_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or repr(error)


def _watch(group: RankGroup, settings: VerifySettings, on_lost: Callable[[str], NoReturn]) -> Watch:
    watch = Watch(group, settings.heartbeat_timeout_s, settings.step_timeout_s, on_lost)
    watch.start()
    return watch
