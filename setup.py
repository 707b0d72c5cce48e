"""The README as an index's page shows it; pyproject.toml has everything else.

On such a page relative links lead nowhere, so they become links to the repository.
"""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

REPOSITORY = "https://github.com/flyspec/flyspec"
FILES = "https://raw.githubusercontent.com/flyspec/flyspec/main/"
_LINK = re.compile(r'(?P<before>!?\[[^\]]*\]\(|(?P<source> src(?:set)?=")| href=")(?P<to>[^)"\s]+)')


def absolute(readme: str) -> str:
    """Return Markdown whose links and images, including those in HTML, all have a host."""

    def link(match: re.Match[str]) -> str:
        before, to = match["before"], match["to"]
        if re.match(r"[a-z]+:", to):
            return match[0]
        if to.startswith("#"):
            return f"{before}{REPOSITORY}{to}"
        shown = before.startswith("!") or match["source"]
        return before + (FILES if shown else f"{REPOSITORY}/blob/main/") + to

    return _LINK.sub(link, readme)


if __name__ == "__main__":
    setup(
        long_description=absolute((Path(__file__).parent / "README.md").read_text("utf-8")),
        long_description_content_type="text/markdown",
    )
