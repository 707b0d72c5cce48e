"""Who may do what on the page: API keys, the switch of drafters, and what a refusal looks like."""

from __future__ import annotations

import re

import pytest

from flyspec.cli.stack_options import HEAD_DRAFTERS
from flyspec.drafter_names import DRAFTER_KINDS, NEED_DATASTORE
from tests.page.browser import RacePage

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

SHORT = {"max_tokens": 24, "k": 8, "seed": 1, "repeats": "1"}


@pytest.fixture
async def locked(browser, keyed):
    """The page of the stack that requires keys; refusals are no problems of its scripts."""
    async with RacePage.opened(browser, keyed.http_url) as opened:
        yield opened
    assert opened.problems == []


async def refusal(page):
    await page.is_in("failed")
    problem = page.tab.locator("#problem")
    await problem.wait_for()
    assert await problem.get_attribute("role") == "alert"
    return await problem.inner_text()


async def test_a_key_is_asked_for_and_kept_in_the_tab(locked, keys):
    assert "target" not in await locked.text("#serves")
    await locked.set(**SHORT)
    await locked.tab.click("#race-button")
    assert "no API key" in await refusal(locked)
    await locked.set(api_key="fsk_wrong")
    await locked.tab.click("#race-button")
    assert "invalid API key" in await refusal(locked)
    await locked.set(api_key=keys["team"])
    await locked.race(**SHORT)
    assert await locked.tab.locator("#problem").is_hidden()
    assert "target" in await locked.text("#serves")
    link = await locked.tab.locator("#link").input_value()
    for place in (link, locked.tab.url, await locked.tab.evaluate("document.cookie")):
        assert keys["team"] not in place
    stored = await locked.tab.evaluate("[JSON.stringify(sessionStorage), localStorage.length]")
    assert keys["team"] in stored[0]
    await locked.tab.reload()
    assert await locked.tab.locator("#api-key").input_value() == keys["team"]
    other = await locked.tab.context.new_page()
    await other.goto(locked.tab.url)
    assert await other.locator("#api-key").input_value() == ""


async def test_a_key_without_the_scope_is_told_so(locked, keys):
    await locked.set(api_key=keys["operator"], **SHORT)
    await locked.tab.click("#race-button")
    assert "has scope admin; this port requires generate" in await refusal(locked)


def switch(page, name):
    return page.tab.get_by_role("button", name=f"Activate {name}")


async def test_drafters_are_switched_with_the_admin_key(locked, keys):
    rows = locked.tab.locator("#drafters tbody tr")
    await locked.set(api_key=keys["team"])
    await locked.tab.locator("#api-key").blur()
    await rows.first.wait_for()
    assert "active" in await rows.first.inner_text()
    assert await switch(locked, "prompt_lookup").count() == 0
    await locked.set(admin_key=keys["operator"])
    await locked.tab.locator("#admin-key").blur()
    await switch(locked, "prompt_lookup").click()
    active = locked.tab.locator("#drafters tr[data-state=ACTIVE][data-name=prompt_lookup]")
    try:
        await active.wait_for()
        assert "prompt_lookup" in await locked.text("#drafters-message")
        await locked.race(**SHORT)  # with the other key
        await locked.tab.click("#rounds-details summary")
        drafters = await locked.tab.locator("#rounds-table tbody td:nth-child(2)").all_inner_texts()
        assert "model" not in drafters
    finally:
        await switch(locked, "model").click()
    await locked.tab.locator("#drafters tr[data-state=ACTIVE][data-name=model]").wait_for()


async def test_a_canary_gets_its_share(locked, keys):
    await locked.set(admin_key=keys["operator"])
    await locked.tab.locator("#admin-key").blur()
    await locked.set(share="0.1")
    await switch(locked, "multi_level").click()
    canary = locked.tab.locator("#drafters tr[data-name=multi_level][data-state=CANARY]")
    try:
        await canary.wait_for()
        assert "10 %" in await canary.inner_text()
        active = await locked.tab.locator("#drafters tr[data-state=ACTIVE]").inner_text()
        assert "90 %" in active
    finally:
        await locked.set(share="")
        await switch(locked, "model").click()


@pytest.mark.parametrize("key", ["team", "wrong"])
async def test_the_switch_is_refused_without_the_admin_key(locked, keys, key):
    await locked.set(admin_key=keys.get(key, "fsk_wrong"))
    await locked.tab.locator("#admin-key").blur()
    message = locked.tab.locator("#drafters-message")
    await locked.tab.locator("#drafters-message:not(:empty)").wait_for()
    assert re.search("scope|admin|API key", await message.inner_text())
    assert await switch(locked, "prompt_lookup").count() == 0
    sent = await locked.tab.evaluate(
        "key => fetch('v1/drafters/prompt_lookup/activate', {method: 'POST',"
        " headers: {authorization: `Bearer ${key}`}}).then(reply => reply.status)",
        keys.get(key, "fsk_wrong"),
    )
    assert sent == (403 if key == "team" else 401)


async def test_an_installation_without_keys_has_no_switch(page):
    drafters = {*DRAFTER_KINDS, *HEAD_DRAFTERS} - NEED_DATASTORE
    assert await page.tab.locator("#drafters tbody tr").count() == len(drafters)
    assert await page.tab.locator("#admin-key").count() == 0
    assert "flyspec drafters activate" in await page.text(".drafters")
    assert await switch(page, "prompt_lookup").count() == 0


async def test_what_cannot_be_decoded_is_refused_in_words(page):
    await page.set(prompt="word " * 5000, **SHORT)
    await page.tab.click("#race-button")
    assert re.search(r"prompt|messages", text := await refusal(page))
    assert "tokens" in text
    await page.race(**SHORT)  # and then it works
    assert await page.tab.locator("#problem").is_hidden()
    await page.set(temperature="0.0005")
    await page.set(rule="fly", knobs={"fly_window_size": "99999"})
    await page.tab.click("#race-button")  # the browser says what is out of range
    field = page.tab.locator(".knobs:not([hidden]) [name=fly_window_size]")
    assert not await field.evaluate("element => element.checkValidity()")
