"""`python -m docs.site FOLDER`: the sources of the site, the documents and the generated pages."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

from docs.site import cli, grpc, http, settings

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PAGES = {"cli": cli.page, "http-api": http.page, "grpc": grpc.page, "settings": settings.page}
"""Generated pages of reference/, by name."""
_OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)")
"""Links to files of the repository that are no documents."""


def main(folder: Path) -> None:
    """Write the sources of the site. Raises `ValueError` for a link to a file that is not there."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home = known.get("urls", {}).get("Homepage", "https://github.com/flyspec/flyspec")
    (folder / "reference").mkdir(parents=True)
    index = (DOCS / "site/pages/index.md").read_text()
    listed = set(re.findall(r"^[\w/-]+$", index, re.MULTILINE))
    for source in DOCS.glob("*.md"):
        (folder / source.name).write_text(outside(source.read_text(), home))
    for name in ("images", "site"):
        shutil.copytree(DOCS / name, folder / name, ignore=shutil.ignore_patterns("*.py", "__*"))
    for image in DOCS.glob("*.svg"):
        shutil.copy(image, folder)
    shutil.copy(DOCS / "site/conf.py", folder)
    others = sorted({source.stem for source in DOCS.glob("*.md")} - listed)
    (folder / "index.md").write_text(index.replace("OTHERS", "\n".join(others)))
    shutil.copy(DOCS / "site/pages/python.md", folder / "reference")
    for name, write in PAGES.items():
        (folder / "reference" / f"{name}.md").write_text(write())


def outside(text: str, home: str) -> str:
    """Have links to the repository's other files lead to its page."""

    def link(found: re.Match[str]) -> str:
        path = found[1].rstrip("/")
        if not (ROOT / path).exists():
            raise ValueError(f"no {path} to link to")
        return f"]({home}/{'tree' if (ROOT / path).is_dir() else 'blob'}/main/{path}"

    return _OUTSIDE.sub(link, text)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
