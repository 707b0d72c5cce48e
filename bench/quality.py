"""`python -m bench.quality`: the tables and plots of docs/quality.md, from studies' reports.

Each part of the document, between <!-- NAME --> and <!-- /NAME -->, shows the study of that name
for every pair of models; the part `claims` gathers what papers report. Reports are kept beside the
plots (images/quality.json), so that studies can be made one by one.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.documents import write_between
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.tables import markdown
from flyspec_lab.studies.catalogue import STUDIES
from flyspec_lab.studies.report import CLAIMS_HEADING

StudyPages = Mapping[str, Mapping[str, Any]]
"""Reports of `flyspec study` by the study's name."""
CLAIMS = "claims"
_LEFT_OUT = {"tok/s", "90 %", "gap rejected", "rollbacks", "dist. B", "1 point needs"}
"""Columns that the studies' own reports have, and the document does not."""
_FOLDED = re.compile("answers against|at equal cost")
"""Tables that a reader opens: they prove what the figures say."""


def read_studies(folder: Path) -> StudyPages:
    """Return the reports in a directory of `flyspec study`. Raises `ConfigError`."""
    found = {}
    for name in STUDIES:
        file = folder / name / "page.json"
        if file.is_file():
            found[name] = json.loads(file.read_text())
    if not found:
        raise ConfigError(f"{folder}: has no reports of `flyspec study`")
    return found


def claims_part(pairs: Mapping[str, StudyPages]) -> str:
    """Return every claim once, with its finding for each pair."""
    claims: dict[tuple[str, str], dict[str, str]] = {}
    for pair, pages in pairs.items():
        for page in pages.values():
            for claim, source, holds, figures in _claims(page):
                claims.setdefault((claim, source), {})[pair] = f"**{holds}**: {figures}"
    rows = [
        [claim, source, *(found.get(pair, "-") for pair in pairs)]
        for (claim, source), found in claims.items()
    ]
    return markdown(["claim", "source", *pairs], rows, left=2 + len(pairs))


def _claims(page: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    for section in page["sections"]:
        if section["heading"] == CLAIMS_HEADING:
            for table in section["tables"]:
                yield from table["rows"]


def study_part(name: str, pairs: Mapping[str, StudyPages], images: str) -> str:
    """Return a study's tables and plots for each pair that has it."""
    parts = []
    for pair, pages in pairs.items():
        if name not in pages:
            continue
        page = pages[name]
        asked = next(iter(page["facts"].values()))  # problems, or requests
        parts.append(f"**{pair}**: {asked}")
        for section in page["sections"]:
            if section["heading"] != CLAIMS_HEADING:
                parts += [_table(table) for table in section["tables"] if table["rows"]]
                parts += [
                    f"![{plot['caption']}](images/{images}-{pair}-{plot['name']}.svg)"
                    for plot in section["plots"]
                ]
    return "\n\n".join(parts)


def _table(table: Mapping[str, Any]) -> str:
    shown = [i for i, column in enumerate(table["columns"]) if column not in _LEFT_OUT]
    rows = [[row[i] for i in shown] for row in table["rows"]]
    columns = [table["columns"][i] for i in shown]
    text = markdown(columns, rows, sum(i < table["left"] for i in shown))
    title = table["title"] or ""
    if _FOLDED.search(title):
        return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"
    return f"{title}:\n\n{text}" if title else text


def _copy_plots(name: str, folder: Path, page: Mapping[str, Any], stem: Path) -> None:
    for section in page["sections"]:
        for plot in section["plots"]:
            shutil.copy(folder / name / f"{plot['name']}.svg", f"{stem}-{plot['name']}.svg")


def read_pairs(texts: Sequence[str]) -> Mapping[str, Path]:
    """Parse NAME=DIRECTORY texts. Raises `ConfigError`."""
    pairs = {}
    for text in texts:
        name, equals, folder = text.partition("=")
        if not equals or not re.fullmatch(r"[a-z0-9-]+", name):
            raise ConfigError(f"{text}: must be NAME=DIRECTORY, such as bundled=studies")
        pairs[name] = Path(folder)
    return pairs


def _updated(kept: Path, found: Mapping[str, StudyPages]) -> Mapping[str, StudyPages]:
    """Add reports to those in a file, and return all."""
    pairs: dict[str, StudyPages] = json.loads(kept.read_text()) if kept.is_file() else {}
    for pair, pages in found.items():
        pairs[pair] = {**pairs.get(pair, {}), **pages}
    kept.write_text(json.dumps(pairs, indent=1) + "\n")
    return pairs


@with_flags
def quality(
    pairs: Annotated[list[str], typer.Argument(
        metavar="NAME=DIRECTORY...", help="A pair's name, and its directory of `flyspec study`.",
    )],
    document: Annotated[Path, Flag("Document to update.")] = Path("docs/quality.md"),
) -> None:  # fmt: skip
    """Write studies into a document: claims, tables and plots of each pair of models.

    Rewrites what is between <!-- NAME --> and <!-- /NAME -->, and nothing else. Studies that were
    not made now are shown as they were made last.
    """
    if not document.is_file():
        raise ConfigError(f"--document {document}: no such file")
    folders = read_pairs(pairs)
    made = {name: read_studies(folder) for name, folder in folders.items()}
    text, stem = document.read_text(), document.stem
    names = [name for name in (CLAIMS, *STUDIES) if f"<!-- {name} -->" in text]
    if not names:
        raise ConfigError(f"--document {document}: has no <!-- {CLAIMS} --> and no study's name")
    images = document.parent / "images"
    images.mkdir(exist_ok=True)
    for pair, pages in made.items():
        for name, page in pages.items():
            if name in names:
                _copy_plots(name, folders[pair], page, images / f"{stem}-{pair}")
    found = _updated(images / f"{stem}.json", made)
    parts = {
        name: claims_part(found) if name == CLAIMS else study_part(name, found, stem)
        for name in names
    }
    document.write_text(write_between(text, {name: part for name, part in parts.items() if part}))
    print(f"wrote {document} and {images / stem}-*.svg")


if __name__ == "__main__":
    run(single(quality))
