"""A race on the page, from the button to the finish line, and what it shows."""

from __future__ import annotations

import re

import pytest

from tests.page.browser import BUS, RacePage

pytestmark = [pytest.mark.clients, pytest.mark.timeout(300)]

RACE = {"rule": "fly", "k": 15, "seed": 7}
SENTENCE = re.compile(
    r"(\d+(\.\d)? times (faster|slower)|The same speed) "
    r"\((one race, so the spread is unknown|.* times in \d races)\), "
    r"(no loose tokens|\d+ loose tokens?, \d+\.\d\d nats), .*(same|different) (answer|text)"
)
FIGURES = ("origin", "round", "target's choice")


async def test_a_race_runs_to_its_finish_line(page):
    assert await page.tab.title() == "flyspec: plain decoding against speculation"
    await page.set(prompt=BUS, **RACE)
    await page.tab.click("#race-button")
    await page.is_in("replaying")
    await page.is_in("finished")  # by itself
    assert SENTENCE.match(await page.text("#verdict"))
    for side in ("plain", "rule"):
        assert float((await page.text(f"#runner-{side} .rate")).replace(",", "")) > 0
    assert "one after the other" in await page.text("main")
    plain = await page.tokens("plain")
    assert {token["origin"] for token in plain} == {"PLAIN"}
    assert "".join(token["text"] for token in plain).strip().endswith("#### 50")


async def test_origins_differences_and_their_legend(page):
    await page.race(**RACE)
    plain, rule = await page.tokens("plain"), await page.tokens("rule")
    origins = {token["origin"] for token in rule}
    assert len(origins) >= 4
    assert {"EXACT_MODEL", "LOOSE", "CORRECTION", "BONUS"} <= origins
    for origin in origins:
        expected = sum(token["origin"] == origin for token in rule)
        assert await page.text(f"#legend li[data-origin={origin}] .count") == str(expected)
    for lane, other in ((plain, rule), (rule, plain)):
        marked = "".join(token["text"] for token in lane if token["differs"])
        assert marked
        kept = [token["text"] for token in lane if not token["differs"]]
        assert kept == [token["text"] for token in other if not token["differs"]]
    loose = [token["text"] for token in rule if token["origin"] == "LOOSE"]
    assert f"{len(loose)} loose token" in await page.text("#verdict")


async def test_pointing_at_a_token_shows_figures(page):
    await page.race(**RACE)
    for origin, more in (
        ("LOOSE", ("entropy", "gap", "draft")),
        ("CORRECTION", ("rejected draft", "gap")),
        ("EXACT_MODEL", ("draft",)),
    ):
        await page.tab.locator(f"#lane-rule .token[data-origin={origin}]").first.hover()
        rows = await page.tab.locator("#card dt").all_inner_texts()
        assert set(rows) >= {*FIGURES, *more}, origin
    text = await page.text("#card")
    assert re.search(r"\d+ of \d+ by model", text)
    await page.tab.mouse.move(0, 0)
    await page.tab.locator("#card").wait_for(state="hidden")


async def test_pointing_at_a_round_shows_what_became_of_its_drafts(page):
    await page.race(**RACE)
    await page.point_at_round(0.5)
    card = page.tab.locator("#card")
    assert await card.locator(".fate").count() > 0
    assert "drafted" in await card.inner_text()
    rows = page.tab.locator("#rounds-table tbody tr")
    await page.tab.click("#rounds-details summary")
    drafted = [row.split("\t") for row in await rows.all_inner_texts()]
    for _, _, count, *fates in drafted:
        assert int(count) == sum(map(int, fates[:-1]))
    assert any(int(row[4]) for row in drafted)  # loose ones


@pytest.mark.parametrize("k", [{"k": 7}, {"k_auto": True, "seed": 3}], ids=["7", "auto"])
async def test_the_link_reproduces_the_run_round_by_round(page, browser, k):
    """Also where K was auto, and so depended on the machine's speed."""
    await page.race(rule="margin", knobs={"margin_threshold": "0.25"}, **k)
    link = await page.tab.locator("#link").input_value()
    assert re.search(r"[#&]seed=\d+", link)
    first = [await page.tokens(side) for side in ("plain", "rule")]
    async with RacePage.opened(browser, link) as again:
        await again.is_in("idle")
        assert await again.tab.locator("#prompt").input_value() == BUS
        assert await again.tab.locator("#rule").input_value() == "margin"
        await again.race(prompt=None)
        assert [await again.tokens(side) for side in ("plain", "rule")] == first
        assert "Reproduced" in await again.text("#link-note")
        same = await again.tab.locator("#link").input_value()
        assert re.findall(r"rounds=([^&]+)", same) == re.findall(r"rounds=([^&]+)", link) != []
        assert again.problems == []


async def test_rollbacks_are_shown(page):
    knobs = {
        "entropy_measure": "normalized", "fly_entropy_threshold": "0.1", "fly_window_size": "2",
        "window_scope": "across_rounds",
    }  # fmt: skip
    await page.race("Write a story about a fox.", rule="fly", k=10, seed=1, knobs=knobs)
    await page.tab.click("#rounds-details summary")
    rows = [
        row.split("\t")
        for row in await page.tab.locator("#rounds-table tbody tr").all_inner_texts()
    ]
    assert sum(int(row[7]) for row in rows) > 0
    assert re.search(r"\d+ rollback", await page.text("#facts"))


async def test_without_motion_the_result_is_there_at_once(browser, stack):
    async with RacePage.opened(browser, stack.http_url, reduced_motion="reduce") as page:
        await page.set(prompt=BUS, **RACE)
        states = []
        await page.tab.expose_function("note", lambda state: states.append(state))
        await page.tab.evaluate(
            "new MutationObserver(() => note(document.documentElement.dataset.state))"
            ".observe(document.documentElement, {attributeFilter: ['data-state']})"
        )
        await page.tab.click("#race-button")
        await page.is_in("finished")
        assert "replaying" not in states
        assert SENTENCE.match(await page.text("#verdict"))
        assert page.problems == []
