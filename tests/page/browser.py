"""Debian's Chromium on the page: how it is started, and what tests do with the page."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.waiting import until

FOLDER = Path(os.environ.get("PAGE", "build/page-test")).resolve()
AXE = FOLDER / "node_modules/axe-core/axe.min.js"
QUIET = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
)  # fmt: skip
"""Runs as root, and asks nobody but the page's server."""
WIDE, NARROW = (1280, 900), (400, 800)
BUS = (
    "A bus sets out with 48 people. At the first stop 12 get on and 8 get off. At the second stop "
    "2 get on and 4 get off. How many people are on the bus then?"
)
"""A word problem: what the bundled models are good at."""
REFUSED = "Failed to load resource"
"""With which Chromium logs every status from 400 on, wanted or not."""


@asynccontextmanager
async def chromium() -> AsyncIterator[Any]:
    """Run Chromium. Raises `ImportError` or `FileNotFoundError` if it is not installed."""
    from playwright.async_api import async_playwright

    path = shutil.which("chromium")
    if path is None:
        raise FileNotFoundError("chromium is not installed; see tests/install.sh")
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=[*QUIET])
        yield browser
        await browser.close()


@dataclass
class RacePage:
    """The page in a tab of its own; `problems` are errors that its scripts met."""

    tab: Any
    problems: list[str] = field(default_factory=list)

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, browser: Any, url: str, size: tuple[int, int] = WIDE, **options: Any
    ) -> AsyncIterator[RacePage]:
        """Open the page in a fresh profile; `options` are of Playwright's `new_context`."""
        width, height = size
        viewport = {"width": width, "height": height}
        context = await browser.new_context(viewport=viewport, **options)
        page = cls(await context.new_page())
        page.tab.on("pageerror", lambda error: page.problems.append(str(error)))
        page.tab.on("console", page._heard)
        await page.tab.goto(url)
        yield page
        await context.close()

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning") and not message.text.startswith(REFUSED):
            self.problems.append(message.text)

    async def is_in(self, *states: str, seconds: float = 60.0) -> None:
        """Wait until the page is in one of the states."""
        wanted = ", ".join(f"html[data-state={state}]" for state in states)
        await self.tab.locator(wanted).wait_for(state="attached", timeout=1e3 * seconds)

    async def until(self, expression: str) -> None:
        """Wait until a JavaScript expression is true.

        Playwright's `wait_for_function` is eval in the page, which its policy forbids.
        """

        async def holds() -> bool:
            return bool(await self.tab.evaluate(expression))

        assert await until(holds), expression

    async def race(self, prompt: str | None = BUS, **settings: Any) -> None:
        """Fill in prompt and settings, as `set` does, start the race, skip to its finish."""
        await self.set(**({} if prompt is None else {"prompt": prompt}), **settings)
        await self.tab.click("#race-button")
        await self.is_in("replaying", "finished")
        await self.tab.click("#skip")
        await self.is_in("finished")

    async def set(self, knobs: dict[str, str] | None = None, **settings: Any) -> None:
        """Set fields by their ids, with underscores for dashes, then the rule's knobs by name."""
        if "k" in settings:
            settings = {"k_auto": False, **settings}
        places = {f"#{name.replace('_', '-')}": value for name, value in settings.items()}
        places |= {f".knobs:not([hidden]) [name={n}]": value for n, value in (knobs or {}).items()}
        for selector, value in places.items():
            place = self.tab.locator(selector)
            if isinstance(value, bool):
                await place.set_checked(value)
            elif await place.evaluate("element => element.tagName") == "SELECT":
                await place.select_option(value)
            else:
                await place.fill(str(value))

    async def point_at_round(self, place: float) -> None:
        """Point at the bar at that fraction of the chart's width, until its card is there."""
        chart = self.tab.locator("#rounds-chart .u-over")
        await chart.scroll_into_view_if_needed()
        near = 0.0

        async def is_told() -> bool:
            nonlocal near
            near = 1.0 - near
            box = await chart.bounding_box()
            x, y = box["x"] + box["width"] * place, box["y"] + box["height"] / 2
            await self.tab.mouse.move(x + near, y)
            return bool(await self.tab.locator("#card").is_visible())

        await until(is_told)  # the page may still be scrolling

    async def text(self, selector: str) -> str:
        return (await self.tab.locator(selector).inner_text()).strip()

    async def tokens(self, side: str) -> list[dict[str, Any]]:
        """Return a lane's tokens: text, origin, and whether the other lane lacks it."""
        found: list[dict[str, Any]] = await self.tab.locator(f"#lane-{side} .token").evaluate_all(
            "all => all.map(e => ({text: e.textContent, origin: e.dataset.origin,"
            " differs: e.classList.contains('differs')}))"
        )
        return found

    async def violations(self) -> list[str]:
        """Return what axe-core finds serious or critical."""
        await self.tab.evaluate(AXE.read_text())
        found = await self.tab.evaluate("axe.run()")
        return [
            f"{v['id']} ({v['impact']}): {v['help']}: {[n['target'] for n in v['nodes']][:5]}"
            for v in found["violations"]
            if v["impact"] in ("serious", "critical")
        ]
