"""The wheel as users install it: in an environment of its own, outside the checkout.

`make wheel-test` runs these tests; they need pip's and npm's registries.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from flyspec_lab.ports import free_port
from tests.wheel.user import ENVIRONMENT, ROOT, run

STARTING_S = 120


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.clients)
            item.add_marker(pytest.mark.timeout(2400))


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("user")


@pytest.fixture(scope="session")
def tools(folder):
    """The programs of an environment with what builds and checks wheels, and others' clients."""
    run(sys.executable, "-m", "venv", folder / "tools", cwd=folder)
    programs = folder / "tools/bin"
    needs = Path(__file__).with_name("requirements.txt")
    pip(programs, "-r", needs)
    return programs


@pytest.fixture(scope="session")
def distributions(tools, folder):
    """The sdist, and the wheel built from it."""
    run(tools / "python", "-m", "build", "--outdir", folder / "dist", ROOT, cwd=folder)
    (sdist,) = folder.glob("dist/flyspec-*.tar.gz")
    (wheel,) = folder.glob("dist/flyspec-*.whl")
    return sdist, wheel


@pytest.fixture(scope="session")
def laboratory(tools, folder):
    """The wheel of flyspec-lab, built from its sdist."""
    where = folder / "dist-lab"
    run(tools / "python", "-m", "build", "--outdir", where, ROOT / "lab", cwd=folder)
    (wheel,) = where.glob("flyspec_lab-*.whl")
    return wheel


@pytest.fixture(scope="session")
def installed(distributions, laboratory, tools, folder):
    """The programs of an environment with flyspec[all] and nothing else; `tools` import it, too."""
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    programs = folder / "venv/bin"
    pip(programs, f"{distributions[1]}[all]", laboratory)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    theirs = run(tools / "python", "-c", where, cwd=folder).strip()
    Path(theirs, "user.pth").write_text(run(programs / "python", "-c", where, cwd=folder))
    return programs


def pip(programs: Path, *what: object) -> None:
    run(programs / "python", "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt",
        *what, cwd=programs)  # fmt: skip


class Served(dict[str, str]):
    """A stack that runs: its port for each port that examples have."""

    def at(self, example: str) -> str:
        """Return an example for this stack."""
        for theirs, ours in self.items():
            example = example.replace(f"127.0.0.1:{theirs}", f"127.0.0.1:{ours}")
        return example


@pytest.fixture(scope="session")
def served(installed, folder):
    """`flyspec serve` on the bundled models, with the rules of the examples."""
    ports = {port: str(free_port()) for port in ("50050", "8000", "50053")}
    where = []
    for flag, port in zip(("--port", "--http-port", "--admin-port"), ports.values(), strict=True):
        where += [flag, port]
    where += ["--draft-port", "0", "--verify-port", "0"]
    with (folder / "serve.log").open("w") as log:
        serving = subprocess.Popen(
            [installed / "flyspec", "serve", *where, "--rules-file", ROOT / "examples/rules.toml"],
            cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        until = time.monotonic() + STARTING_S
        while not is_healthy(ports["8000"]):
            assert serving.poll() is None, (folder / "serve.log").read_text()
            assert time.monotonic() < until, (folder / "serve.log").read_text()
            time.sleep(0.2)
        yield Served(ports)
    finally:
        serving.terminate()
        assert serving.wait(60) is not None


def is_healthy(port: str) -> bool:
    try:
        return urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
    except OSError:
        return False
