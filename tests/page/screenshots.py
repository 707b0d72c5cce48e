"""Takes the pictures of the page in docs/images: `make page-screenshots`.

    python -m tests.page.screenshots [--output FOLDER]

The bundled models race on this machine, so figures differ from run to run.
"""

from __future__ import annotations

import argparse
import asyncio
import io
from pathlib import Path

from PIL import Image

from flyspec.cli.stack import Stack, StackOptions
from tests.page.browser import BUS, NARROW, WIDE, RacePage, chromium

MAX_BYTES = 200_000
SHOTS = {
    "page-light": ("light", (WIDE[0], 1230)),
    "page-dark": ("dark", (WIDE[0], 1230)),
    "page-narrow": ("light", (NARROW[0], 1600)),
}
"""By file name: colour scheme, size of the window."""
SETTINGS = {"k": 15, "seed": 7, "repeats": "5"}


async def take(folder: Path) -> list[Path]:
    """Take all pictures; return their files."""
    taken: list[Path] = []
    async with Stack(StackOptions(http_port=0)) as stack, chromium() as browser:
        assert stack.http_url is not None
        for name, (scheme, size) in SHOTS.items():
            async with RacePage.opened(browser, stack.http_url, size, color_scheme=scheme) as page:
                if name == "page-light":
                    taken.append(await _during(page, folder / "page-race.png"))
                else:
                    await page.race(BUS, **SETTINGS)
                taken.append(await _picture(page, folder / f"{name}.png"))
    for file in taken:
        if file.stat().st_size > MAX_BYTES:
            raise SystemExit(f"{file} has {file.stat().st_size} bytes, more than {MAX_BYTES}")
    return taken


async def _during(page: RacePage, file: Path) -> Path:
    """Take a picture in the middle of the replay, and let it go on to its end."""
    await page.set(prompt=BUS, **SETTINGS)
    await page.tab.click("#race-button")
    await page.is_in("replaying")
    await page.until("Number(document.getElementById('clock').value) > 450")
    await page.tab.click("#pause")
    await _picture(page, file)
    await page.tab.click("#skip")
    await page.is_in("finished")
    return file


async def _picture(page: RacePage, file: Path) -> Path:
    await page.tab.evaluate("scrollTo(0, 0)")
    await page.tab.mouse.move(0, 0)
    taken = await page.tab.screenshot(animations="disabled", scale="css")
    with Image.open(io.BytesIO(taken)) as image:
        _small(image.convert("RGB")).save(file, optimize=True)
    return file


def _small(image: Image.Image) -> Image.Image:
    """Return the image in 256 colours: half are its most frequent ones, half are spread evenly."""
    counted: list[tuple[int, tuple[int, ...]]] = image.getcolors(1 << 24)  # type: ignore[assignment]
    frequent = [value for _, color in sorted(counted)[:-129:-1] for value in color]
    spread = image.quantize(128, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette = Image.new("P", (1, 1))
    palette.putpalette([*frequent, *(spread.getpalette() or [])])
    return image.quantize(palette=palette, dither=Image.Dither.NONE)


def main() -> None:
    parser = argparse.ArgumentParser(description="Takes the pictures of the page.")
    parser.add_argument("--output", type=Path, default=Path("docs/images"))
    folder = parser.parse_args().output
    folder.mkdir(parents=True, exist_ok=True)
    for file in asyncio.run(take(folder)):
        print(f"{file}: {file.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
