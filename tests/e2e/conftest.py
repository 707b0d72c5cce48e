"""The installation under test: the bundled models, started once for all tests, or --address."""

from __future__ import annotations

from pathlib import Path

import pytest

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.engine.native.library import Library, find
from tests.e2e.installation import PORTS, Installation, credentials_from


def pytest_addoption(parser):
    group = parser.getgroup("e2e", "testing an installation that runs (tests/e2e)")
    for port in PORTS:
        name = "generation" if port == "address" else port.removesuffix("_address")
        group.addoption(
            f"--{port.replace('_', '-')}", default="", metavar="HOST:PORT",
            help=f"Address of the installation's {name} port.",
        )  # fmt: skip
    group.addoption("--api-key", default="", help="API key.")
    group.addoption(
        "--certificates", type=Path, metavar="FOLDER",
        help="Use TLS, with the certificates `client` and `operator` in this folder, as "
        "deploy/demo_certificates.sh makes it.",
    )  # fmt: skip
    group.addoption(
        "--podman", action="store_true",
        help="Podman runs the installation on this machine, by `podman play kube`: also pause, "
        "kill and stop its containers.",
    )  # fmt: skip


def pytest_collection_modifyitems(config, items):
    """With --address, skip tests that do not ask the installation under test."""
    if config.getoption("--address", ""):
        skip = pytest.mark.skip(reason="needs services started here; --address is given")
        for item in items:
            if Path(__file__).parent in item.path.parents and "stack" not in item.fixturenames:
                item.add_marker(skip)


@pytest.fixture(scope="session")
async def bundled(pytestconfig):
    """The bundled models, started here, in numerics in which no tie falls either way.

    Those are the native step's, whose bits depend on no batch, and where there is none, float64's.
    """
    if pytestconfig.getoption("--address", ""):
        yield None
        return
    dtype = "bfloat16" if isinstance(find(), Library) else "float64"
    options = StackOptions(
        dtype=dtype, draft_dtype=dtype, log_level="warning",
        max_model_len=2560,  # shorter than the model's limit, for memory
    )  # fmt: skip
    async with Stack(options) as running:
        yield running


@pytest.fixture(scope="session")
async def stack(pytestconfig, bundled):
    """The installation under test."""
    if bundled is not None:
        return Installation(*(getattr(bundled.options, port) for port in PORTS))
    addresses = [pytestconfig.getoption(f"--{port.replace('_', '-')}") for port in PORTS]
    folder, key = pytestconfig.getoption("--certificates"), pytestconfig.getoption("--api-key")
    client, operator = (credentials_from(folder, name, key) for name in ("client", "operator"))
    installation = Installation(*addresses, client, operator)
    await installation.ready()
    return installation
