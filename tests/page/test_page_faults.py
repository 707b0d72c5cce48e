"""What the page shows when services die, and when the server is gone."""

from __future__ import annotations

import re
import signal

import pytest

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from tests.page.browser import RacePage
from tests.waiting import until

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

LONG = {"api": "completions", "max_tokens": 480, "k": 6, "seed": 1, "repeats": "1", "rule": "fly"}
PROMPT = "def fibonacci(n):"


async def tokens_of(page, side):
    return await page.tab.locator(f"#lane-{side} .token").count()


async def recording(page):
    """Start a race; return when its second lane has tokens."""
    await page.set(prompt=PROMPT, **LONG)
    await page.tab.click("#race-button")
    await page.is_in("recording-rule", seconds=120)
    await until(lambda: tokens_of(page, "rule"))


async def finished(page):
    await page.is_in("replaying", seconds=200)
    await page.tab.click("#skip")
    await page.is_in("finished")


async def test_a_killed_target_shows_and_the_stream_resumes(page, stack):
    await recording(page)
    before = await tokens_of(page, "rule")
    stack.services["verify"].send(signal.SIGKILL)
    notice = page.tab.locator("#lane-rule .recovery").first
    await notice.wait_for()
    # It may be back before anything else is said: services are restarted within a second.
    assert re.search("[Tt]arget (is )?lost", await notice.inner_text())
    await finished(page)
    assert await tokens_of(page, "rule") > before
    recovery = page.tab.locator("#lane-rule .recovery[data-kind=TARGET_REOPENED]")
    assert await recovery.count() >= 1
    assert re.search(r"Target lost and reopened after .* s", await recovery.first.inner_text())
    # The link's run has the same text: the target lost nothing.
    link = await page.tab.locator("#link").input_value()
    first = await page.tokens("rule")
    async with RacePage.opened(page.tab.context.browser, link) as again:
        await again.race(prompt=None)
        assert await again.tokens("rule") == first


async def test_a_killed_drafter_shows(page, stack):
    await recording(page)
    stack.services["draft"].send(signal.SIGKILL)
    await finished(page)
    recoveries = page.tab.locator("#lane-rule .recovery[data-kind^=DRAFTER]")
    assert await recoveries.count() >= 1
    assert "rafter" in await recoveries.first.inner_text()


async def test_a_server_that_is_gone_is_said_so(browser):
    async with (
        Stack(StackOptions(http_port=0, draft_model="")) as stack,
        RacePage.opened(browser, stack.http_url) as page,
    ):
        await page.set(prompt=PROMPT, **LONG)
        await page.tab.click("#race-button")
        await page.is_in("recording-plain")
        await until(lambda: tokens_of(page, "plain"))
        stack.services["orchestrator"].send(signal.SIGKILL)
        await page.is_in("failed")
        assert "connection to the server was lost" in await page.text("#problem")
        await page.tab.click("#race-button")

        async def says_so():
            return "The server does not answer." in await page.text("#problem")

        await until(says_so)  # until then it is still in the state that it was in
        await page.is_in("failed")
        assert await page.text("#race-button") == "Race"
