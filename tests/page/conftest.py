"""The bundled models behind the page, without and with API keys, and Chromium."""

from __future__ import annotations

import asyncio

import pytest

from flyspec.cli.serve import supervise
from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from flyspec.security import ApiKey, Scope
from flyspec.security.keys import entry_of, new_key
from tests.page import browser as chromium_of
from tests.page.browser import RacePage


@pytest.fixture(scope="session")
async def stack():
    """A stack whose services are restarted when they die, as `flyspec serve` does."""
    async with Stack(StackOptions(http_port=0)) as running:
        watch = asyncio.create_task(supervise(running))
        yield running
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


@pytest.fixture(scope="session")
def keys():
    """API keys by name: one that generates, one that administers."""
    return {name: new_key() for name in ("team", "operator")}


@pytest.fixture(scope="session")
async def keyed(keys, tmp_path_factory):
    """A stack that requires keys."""
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    scopes = {"team": Scope.GENERATE, "operator": Scope.ADMIN}
    owners = {name: ApiKey(name, frozenset({scope})) for name, scope in scopes.items()}
    file.write_text("\n".join(entry_of(keys[name], owner) for name, owner in owners.items()))
    flags = ("--api-keys-file", str(file))
    async with Stack(StackOptions(http_port=0, orchestrator_flags=flags)) as running:
        yield running


@pytest.fixture(scope="session")
async def browser():
    pytest.importorskip("playwright", reason="run `make page-test`")
    try:
        async with chromium_of.chromium() as running:
            yield running
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
async def page(browser, stack):
    """The page of the stack without keys; its scripts must not meet errors."""
    async with RacePage.opened(browser, stack.http_url) as opened:
        yield opened
    assert opened.problems == []
