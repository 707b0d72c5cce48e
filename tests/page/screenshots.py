"""Takes the pictures of the page in docs/images: `make page-screenshots`.

    python -m tests.page.screenshots [--output FOLDER]

The bundled models race on this machine, so speeds differ from run to run: leave it alone meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from flyspec.cli.stack import Stack
from flyspec.cli.stack_options import StackOptions
from tests.page.browser import BUS, NARROW, WIDE, RacePage, chromium

MAX_BYTES = 200_000
SHOTS = {
    "page-light": ("light", WIDE),
    "page-dark": ("dark", WIDE),
    "page-narrow": ("light", NARROW),
}
"""A race that is finished, by file name: colour scheme, size of the window."""
MARGIN = 16
SETTINGS = {"k": 15, "seed": 7, "repeats": "5"}


async def take(folder: Path) -> list[Path]:
    """Take all pictures; return their files."""
    taken: list[Path] = []
    async with Stack(StackOptions(http_port=0)) as stack, chromium() as browser:
        assert stack.http_url is not None
        for name, (scheme, size) in SHOTS.items():
            options = {"color_scheme": scheme}
            async with RacePage.opened(browser, stack.http_url, size, **options) as page:
                await page.race(BUS, **SETTINGS)
                taken.append(await _picture(page, folder / f"{name}.png"))
                if name == "page-light":
                    taken.append(await _in_the_middle(page, folder / "page-race.png"))
                    taken.append(await _rounds(page, folder / "page-rounds.png"))
    for file in taken:
        if file.stat().st_size > MAX_BYTES:
            raise SystemExit(f"{file} has {file.stat().st_size} bytes, more than {MAX_BYTES}")
    return taken


async def _picture(page: RacePage, file: Path) -> Path:
    """Take a picture of the page from its top to the end of the race."""
    await page.tab.mouse.move(0, 0)
    box = await page.tab.locator("section.race").bounding_box()
    clip = {"x": 0, "y": 0, "width": page.tab.viewport_size["width"]}
    clip["height"] = box["y"] + box["height"] + await page.tab.evaluate("scrollY") + MARGIN
    await page.tab.screenshot(path=file, full_page=True, clip=clip, animations="disabled")
    return file


async def _in_the_middle(page: RacePage, file: Path) -> Path:
    """Take a picture in the middle of the replay."""
    await page.tab.click("#again")
    await page.until("Number(document.getElementById('clock').value) > 550")
    await page.tab.click("#pause")
    await _picture(page, file)
    await page.tab.click("#skip")
    return file


async def _rounds(page: RacePage, file: Path) -> Path:
    """Take a picture of the rounds and what is known of one of them."""
    await page.set_size(WIDE[0], 1500)
    await page.point_at_round(0.5)
    panel, card = page.tab.locator("section.rounds"), page.tab.locator("#card")
    box, beside = await panel.bounding_box(), await card.bounding_box()
    end = max(box["y"] + box["height"], beside["y"] + beside["height"]) + MARGIN
    clip = {
        "x": box["x"] - MARGIN, "y": box["y"] + 1, "width": box["width"] + 2 * MARGIN,
        "height": end - box["y"],
    }  # fmt: skip
    await page.tab.screenshot(path=file, clip=clip, animations="disabled")
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes the pictures of the page.")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for file in asyncio.run(take(folder)):
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
