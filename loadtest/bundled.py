"""The same on a stack of its own: `python -m loadtest.bundled SCENARIO [flags]`.

Starts `flyspec serve` with the bundled models, and further drafters and orchestrators where a
scenario needs them, and stops everything after the test.
"""

from __future__ import annotations

import loadtest.patched  # noqa: F401  before anything that gevent has to patch

# isort: split
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Annotated, Any

from flyspec.bundled import DRAFT, EAGLE3, MODELS
from flyspec.cli.options.stack import ModelFlags, setting, to_flags
from flyspec.cli.program import run, say
from flyspec.cli.service import ROOT
from flyspec.cli.stack_options import HEAD_DRAFTERS
from flyspec.config import NO_PORT, VerifySettings
from flyspec.drafter_names import RELAY
from flyspec.errors import FlyspecError
from flyspec.flags import Dtype, Flag, flags_of
from flyspec.preflight.gguf import INSTALL, missing_packages
from flyspec.startup import STAGE
from flyspec.word_problems import problems
from loadtest.command import scenario_app
from loadtest.options import LoadOptions
from loadtest.run import run_test
from loadtest.scenarios import Scenario
from loadtest.scenarios.drafter_swap import Candidate, SwapFlags
from loadtest.scenarios.recovery import RecoveryFlags
from loadtest.scenarios.sharing import SharingFlags

HERE = "here"
GGUF = "gguf"
DRAFTERS = (
    ("model-b", "draft", "model"), ("recycling", "", "token_recycling"), (EAGLE3.name, HERE, ""),
    ("bytes", "draft-bytes", "model"), ("stored", "", "rest"), (RELAY, HERE, ""),
    ("levels", "draft", "multi_level"), ("quantized", GGUF, "model"), ("pays", "draft", "composed"),
)  # fmt: skip
"""Name, bundled model (empty: none) and kind of each drafter that takes turns; `HERE` are those
that the stack has itself, `GGUF` is the draft model as a file of llama.cpp's."""
LOOPBACK = "127.0.0.1"
END_S = 60.0
"""Time for a process to stop when told to."""
_GROUP = "Stack (its services also read their environment variables)"


def _stack(name: str) -> Flag:
    return replace(flags_of(ModelFlags)[name][1], group=_GROUP)


# fmt: off
@dataclass(frozen=True)
class StackFlags:
    """The stack."""

    model: Annotated[str | None, _stack("model")] = None
    draft_model: Annotated[str | None, _stack("draft_model")] = None
    dtype: Annotated[Dtype, _stack("dtype")] = "auto"
    max_sessions: Annotated[int, setting(VerifySettings, "max_sessions", group=_GROUP)] = 32
    orchestrators: Annotated[int | None, Flag(
        "Orchestrators over the same services.", min=1, group=_GROUP, default="2 for sharing, or 1",
    )] = None
    # fmt: on


def start(scenario: type[Scenario[Any]], load: LoadOptions, own: Any, stack: StackFlags) -> int:
    """Start the stack and run the test; its exit code."""
    load.validate()
    with ExitStack() as ending:
        further = (stack.orchestrators or 1 + isinstance(own, SharingFlags)) - 1
        http = load.connection.protocol == "http"
        served = _serve(ending, replace(stack, orchestrators=None), own, http)
        addresses = [
            served["http_url" if http else "address"],
            *(_orchestrator(ending, served, http) for _ in range(further)),
        ]
        load = replace(
            load,
            address=",".join(addresses),
            admin_address=served["admin_address"],
            watch=(*load.watch, *served["pids"].items()),
        )
        if isinstance(own, SwapFlags):
            own = replace(own, swap_to=tuple(_candidates(ending)))
        if isinstance(own, RecoveryFlags):
            own = replace(own, replica=_drafter(ending, str(DRAFT)))
        return run_test(scenario, load, own, say)


def _http_port(http: bool) -> int:
    return 0 if http else NO_PORT


def _serve(ending: ExitStack, stack: StackFlags, own: Any, http: bool) -> dict[str, Any]:
    """Start `flyspec serve`; its addresses and process ids."""
    ports = dict.fromkeys(("port", "admin_port", "draft_port", "verify_port"), 0)
    ports["http_port"] = _http_port(http)
    flags = to_flags(**ports, log_level="error", **vars(stack))
    more = {}
    if isinstance(own, RecoveryFlags):
        more["FLYSPEC_ORCHESTRATOR_DRAFT_TIMEOUT_S"] = str(own.draft_timeout)
    process = _start(ending, ["flyspec.cli", "serve", "--json", *flags], environment=more)
    assert process.stdout is not None
    return _announced("the stack", process.stdout)


def _candidates(ending: ExitStack) -> Iterator[Candidate]:
    """Start the drafters that take turns, but those that the stack has itself."""
    store = _datastore(ending)
    for name, model, kind in DRAFTERS:
        if model == HERE:
            if name in HEAD_DRAFTERS:
                yield Candidate(name)
            else:
                say(f"LEFT OUT {name}: there is no head in {EAGLE3}")
        elif model == GGUF:
            if file := _gguf(ending):
                yield Candidate(name, _drafter(ending, str(file)), kind)
        else:
            folder = str(MODELS / model) if model else ""
            yield Candidate(name, _drafter(ending, folder, store), kind)


def _gguf(ending: ExitStack) -> Path | None:
    """Write the draft model as a GGUF file; None if what serves it is not installed."""
    if missing := missing_packages():
        say(f"LEFT OUT the GGUF drafter: needs {' and '.join(missing)}: {INSTALL}")
        return None
    folder, kind = Path(ending.enter_context(TemporaryDirectory())), "q8_0"
    write = ["--type", kind, "--folder", str(folder)]
    # In a process of its own: it needs torch.
    subprocess.run([sys.executable, "-m", "demo.gguf", *write], check=True, capture_output=True)
    return folder / f"{DRAFT.name}-{kind}.gguf"


def _datastore(ending: ExitStack) -> str:
    """Build a datastore of word problems and their answers; its directory."""
    folder = Path(ending.enter_context(TemporaryDirectory()))
    texts = (f"{problem.question}\n{problem.solution}" for problem in problems("stored", 500))
    (folder / "problems.txt").write_text("\n\n".join(texts))
    build = ["datastore", "build", "--output", str(folder / "store"), str(folder / "problems.txt")]
    subprocess.run([sys.executable, "-m", "flyspec.cli", *build], check=True, capture_output=True)
    return str(folder / "store")


def _drafter(ending: ExitStack, model: str, datastore: str = "") -> str:
    """Start another draft service; its address."""
    flags = ["--model", model, "--threads", "1"]
    flags += ["--datastore", datastore] if datastore else []
    return f"{LOOPBACK}:{_service(ending, 'draft_service', flags)['port']}"


def _orchestrator(ending: ExitStack, served: Mapping[str, Any], http: bool) -> str:
    """Start another orchestrator over the stack's services; its address."""
    flags = [
        "--admin-port", "0", "--http-port", str(_http_port(http)), "--upstream-tls", "false",
        "--verify-address", served["verify_address"], "--draft-address", served["draft_address"],
    ]  # fmt: skip
    found = _service(ending, "orchestrator", flags)
    return f"{LOOPBACK}:{found['http_port' if http else 'port']}"


def _service(ending: ExitStack, module: str, flags: Sequence[str]) -> dict[str, Any]:
    """Start a service on a free port; what it announces when it is ready."""
    read_fd, write_fd = os.pipe()
    common = ["--port", "0", "--log-level", "error", "--ready-fd", str(write_fd)]
    _start(ending, [module, *flags, *common], [write_fd])
    os.close(write_fd)
    with os.fdopen(read_fd, "rb") as announcement:
        return _announced(module, announcement)


def _start(
    ending: ExitStack,
    command: Sequence[str],
    pass_fds: Sequence[int] = (),
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a Python module that ends with `ending`, or with this process, however that ends."""
    python_path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "flyspec.cli.child", *command],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, pass_fds=pass_fds, start_new_session=True,
        env={**os.environ, "PYTHONPATH": python_path, "TQDM_DISABLE": "1",
             **(environment or {})},
    )  # fmt: skip

    def stop() -> None:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()

    ending.callback(stop)
    return process


def _announced(what: str, lines: IO[bytes]) -> dict[str, Any]:
    """Read what a service announces once it is ready, after the stages of its start."""
    for line in lines:
        found: dict[str, Any] = json.loads(line)
        if STAGE not in found:
            return found
    raise FlyspecError(f"{what} did not start")


app = scenario_app(
    "Start the bundled models, test them under load, and stop them.", start, stack=StackFlags()
)

if __name__ == "__main__":
    run(app)
