"""The page for everybody: axe-core's rules, the keyboard alone, what a screen reader hears."""

from __future__ import annotations

import re

import pytest

from tests.page.browser import BUS, NARROW, WIDE, RacePage

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

RACE = {"rule": "fly", "k": 15, "seed": 7, "repeats": "1"}


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_axe_finds_nothing_serious(browser, stack, scheme, size):
    async with RacePage.opened(browser, stack.http_url, size, color_scheme=scheme) as page:
        assert await page.violations() == []
        await page.race(**RACE)
        await page.tab.click("#rounds-details summary")
        await page.tab.locator("#lane-rule .token").first.hover()
        assert await page.violations() == []
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.tab.evaluate(overflow) <= 0
        await page.set(max_tokens="")  # a refusal by the form, and one by the server
        await page.tab.click("#race-button")
        await page.set(prompt="word " * 5000, max_tokens=8)
        await page.tab.click("#race-button")
        await page.is_in("failed")
        assert await page.violations() == []
        assert page.problems == []


async def test_axe_finds_nothing_serious_where_keys_are_needed(browser, keyed, keys):
    async with RacePage.opened(browser, keyed.http_url) as page:
        await page.set(api_key=keys["team"], admin_key=keys["operator"])
        await page.tab.locator("#admin-key").blur()
        await page.tab.get_by_role("button", name="Activate prompt_lookup").wait_for()
        assert await page.violations() == []


async def focused(page):
    return await page.tab.evaluate("document.activeElement.id || document.activeElement.className")


async def tab_to(page, name, most=80):
    """Press Tab until the element with that id or class has the focus."""
    for _ in range(most):
        await page.tab.keyboard.press("Tab")
        if await focused(page) == name:
            return
    raise AssertionError(f"Tab does not reach {name}")


async def test_a_race_by_keyboard_alone(page):
    keyboard = page.tab.keyboard
    await keyboard.press("Tab")
    assert await focused(page) == "skip-link"
    await keyboard.press("Enter")
    assert await focused(page) == "prompt"
    await page.set(**RACE)
    await page.tab.locator("#prompt").focus()
    await keyboard.press("Control+A")
    await keyboard.type(BUS)
    await tab_to(page, "race-button")
    await keyboard.press("Enter")
    await page.is_in("replaying", "finished")
    await tab_to(page, "skip")
    await keyboard.press("Space")
    await page.is_in("finished")
    await page.tab.locator("#lane-rule .lane-text").focus()
    for _ in range(80):
        await keyboard.press("ArrowRight")
        if "entropy" in await page.text("#card"):
            break
    told = await page.text("#card")
    for figure in ("origin", "round", "target's choice", "entropy"):
        assert figure in told
    assert await page.text("#announcer")
    await keyboard.press("Escape")
    assert await page.tab.locator("#card").is_hidden()
    await page.tab.locator("#rounds-chart").focus()
    await keyboard.press("ArrowRight")
    await keyboard.press("ArrowRight")
    chart = page.tab.locator("#rounds-chart")
    assert await chart.get_attribute("aria-valuenow") == "2"
    assert re.search(r"drafted: \d+", await chart.get_attribute("aria-valuetext"))
    card = page.tab.locator("#card")
    await card.wait_for()
    below = (await card.bounding_box())["y"] - (await chart.bounding_box())["y"]
    await page.tab.evaluate("scrollBy(0, 40)")
    assert await card.is_visible()
    assert (await card.bounding_box())["y"] - (await chart.bounding_box())["y"] == pytest.approx(
        below, abs=1
    )


async def test_focus_is_visible(page):
    for _ in range(12):
        await page.tab.keyboard.press("Tab")
        seen = await page.tab.evaluate(
            "(() => { const style = getComputedStyle(document.activeElement);"
            " return style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) > 0; })()"
        )
        assert seen, await focused(page)


async def test_a_screen_reader_hears_the_course_of_a_race(page):
    heard = []
    await page.tab.expose_function("heard", lambda text: heard.append(text))
    await page.tab.evaluate(
        "new MutationObserver(() => heard(document.getElementById('announcer').textContent))"
        ".observe(document.getElementById('announcer'), {childList: true, characterData: true,"
        " subtree: true})"
    )
    assert await page.tab.locator("#announcer").get_attribute("aria-live") == "polite"
    await page.race(**RACE)
    said = " ".join(heard)
    assert "Recording plain decoding." in said
    assert "Recording fly." in said
    assert (await page.text("#verdict")).rstrip(".") in said
    assert len(heard) < 12  # tokens are not read out one by one


async def test_colours_have_a_second_mark(page):
    """Origins differ in more than colour: line, weight or background."""
    await page.race(**RACE)
    marks = await page.tab.locator("#legend .token").evaluate_all(
        "all => all.map(e => { const s = getComputedStyle(e); return [s.textDecorationLine,"
        " s.textDecorationStyle, s.fontWeight, s.borderBottomStyle, s.borderTopStyle,"
        " s.borderBottomWidth, s.fontStyle, s.boxShadow !== 'none', s.backgroundImage.length]"
        ".join(' '); })"
    )
    assert len(set(marks)) == len(marks), marks


async def test_the_theme_can_be_chosen(page):
    background = "getComputedStyle(document.documentElement).backgroundColor"
    seen = set()
    for _ in range(3):
        seen.add((await page.text("#theme"), await page.tab.evaluate(background)))
        await page.tab.click("#theme")
    assert len({name for name, _ in seen}) == 3
    assert len({colour for _, colour in seen}) == 2
