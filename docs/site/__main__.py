"""`python -m docs.site FOLDER`: the sources of the site, the documents and the generated pages."""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

from docs.site import reference

DOCS = Path(__file__).resolve().parents[1]
ROOT = DOCS.parent
PAGES = {
    "cli": reference.command_line,
    "http-api": reference.http_api,
    "settings": reference.settings,
}
"""Generated pages of reference/, by name."""
FOLDERS = (".", "measurements", "reference")
"""Folders of documents."""
_LINK = re.compile(r"\]\((\.\./[^)#\s]+)")


def main(folder: Path) -> None:
    """Write the sources of the site. Raises `ValueError` for a link to a file that is not there."""
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    home = known.get("urls", {}).get("Homepage", "https://github.com/flyspec/flyspec")
    (folder / "reference").mkdir(parents=True)
    index = (DOCS / "site/pages/index.md").read_text()
    listed = set(re.findall(r"^[\w/-]+$", index, re.MULTILINE))
    for name in ("images", "measurements/images", "site"):
        shutil.copytree(DOCS / name, folder / name, ignore=shutil.ignore_patterns("*.py", "__*"))
    for source in (source for name in FOLDERS for source in (DOCS / name).glob("*.md")):
        (folder / source.relative_to(DOCS)).write_text(outside(source, home))
    shutil.copy(DOCS / "site/conf.py", folder)
    others = sorted({source.stem for source in DOCS.glob("*.md")} - listed)
    (folder / "index.md").write_text(index.replace("OTHERS", "\n".join(others)))
    for name in ("python", "grpc"):
        shutil.copy(DOCS / f"site/pages/{name}.md", folder / "reference")
    shutil.copytree(ROOT / "protos/flyspec/v1", folder / "protos")
    for name, write in PAGES.items():
        (folder / "reference" / f"{name}.md").write_text(write())


def outside(source: Path, home: str) -> str:
    """Return a document whose links to the repository's other files lead to its page."""

    def link(found: re.Match[str]) -> str:
        path = (source.parent / found[1]).resolve()
        if not path.exists():
            raise ValueError(f"{source}: no {found[1]} to link to")
        if path.is_relative_to(DOCS):
            return found[0]
        name = path.relative_to(ROOT).as_posix()
        return f"]({home}/{'tree' if path.is_dir() else 'blob'}/main/{name}"

    return _LINK.sub(link, source.read_text())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
