"""`python -m bench.documents`: tables and plots of a document, from JSON reports in a folder.

A document says itself what it shows. Between <!-- measured NAME... --> and its end, the same with
a slash, are the facts, tables, text and plots of the reports FOLDER/NAME.json; tables of equal
columns are one. Names may have wildcards. After `: ` comes the heading of the only section to show.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.tables import FittedTable, markdown

Documents = Mapping[str, Mapping[str, Any]]
"""Reports by their names."""
_MEASURED = re.compile(
    r"(<!-- measured ([^:\n]*?)(?:: ([^\n]*?))? -->\n).*?(<!-- /measured \2(?:: \3)? -->)",
    re.DOTALL,
)


def read_documents(folder: Path, names: Sequence[str]) -> Documents:
    """Return the reports in a folder, in the order of the names; none if one of them is missing.

    Raises `ConfigError` for a file that is no JSON.
    """
    found = {}
    for name in names:
        paths = sorted(folder.glob(f"{name}.json"))
        if not paths:
            return {}
        for path in paths:
            try:
                document = json.loads(path.read_text())
            except ValueError as error:
                raise ConfigError(f"{path}: not JSON: {error}") from None
            found[str(path.relative_to(folder).with_suffix(""))] = document
    return found


def measured_part(folder: Path, documents: Documents, heading: str, images: Path) -> str:
    """Return what reports show: facts, tables, text, and plots.

    Plots that lie beside reports are copied into the folder `images`.
    """
    tables, text, plots, facts = [], [], [], []
    for name, document in documents.items():
        label = name.removesuffix("/report")
        facts.append(f"- {label}: {'; '.join(_facts(document))}")
        for section in document["report"]["sections"]:
            if heading not in ("", section["heading"]):
                continue
            for table in section["tables"]:
                title = ": ".join([label] * (len(documents) > 1) + [table["title"] or ""])
                tables.append(FittedTable(**{**table, "title": title.removesuffix(": ")}))
            text += section["paragraphs"]
            for plot in section["plots"]:
                beside = (folder / name).with_name(f"{plot['name']}.svg")
                file = f"{images.name}-{label.replace('/', '-')}-{plot['name']}.svg"
                if beside.is_file():
                    shutil.copy(beside, images.with_name(file))
                plots.append(f"![{plot['caption']}](images/{file})")
    shown = [] if heading else ["\n".join(facts)]
    for joined in _joined(table for table in tables if table.rows):
        if joined.title:
            shown.append(f"{joined.title}:")
        rows = [list(map(str, row)) for row in joined.rows]
        shown.append(markdown(joined.columns, rows, joined.left))
    return "\n\n".join([*shown, *dict.fromkeys(text), *plots])


def _facts(document: Mapping[str, Any]) -> list[str]:
    """Return how a report was made, and on which machine."""
    facts = [f"{key} {value}" for key, value in document["report"]["facts"].items()]
    if "command" in document:
        facts.append(f"`{' '.join(document['command'])}`")
    if machine := document.get("machine"):
        names = [machine["accelerator"] or machine["processor"], f"{machine['cores']} cores"]
        names += [f"{package} {of}" for package, of in machine["versions"].items()]
        facts.append(", ".join(names))
    return facts


def _joined(tables: Iterable[FittedTable]) -> list[FittedTable]:
    """Join tables of the same columns into one, with their titles as the first column."""
    alike: dict[tuple[str, ...], list[FittedTable]] = {}
    for table in tables:
        alike.setdefault(tuple(table.columns), []).append(table)
    return [
        of[0]
        if len(of) == 1
        else FittedTable(
            ["", *columns],
            [[table.title or "", *row] for table in of for row in table.rows],
            left=1 + of[0].left,
        )
        for columns, of in alike.items()
    ]


@with_flags
def documents(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of JSON reports.")],
    document: Annotated[Path, Flag("Document to update.")],
) -> None:
    """Write measurements into a document, between its marks.

    Parts of which reports are missing are left as they are.
    """
    if not document.is_file():
        raise ConfigError(f"--document {document}: no such file")
    images = document.parent / "images" / document.stem
    images.parent.mkdir(exist_ok=True)
    written = []

    def measured(part: re.Match[str]) -> str:
        begin, names, heading, end = part.groups()
        if found := read_documents(folder, names.split()):
            written.append(names)
            return f"{begin}\n{measured_part(folder, found, heading or '', images)}\n\n{end}"
        return part[0]

    text, marks = _MEASURED.subn(measured, document.read_text())
    if not marks:
        raise ConfigError(f"--document {document}: has no <!-- measured NAME --> mark and its end")
    if not written:
        raise ConfigError(f"{folder}: has none of the reports that {document} shows")
    document.write_text(text)
    print(f"wrote {document}")


if __name__ == "__main__":
    run(single(documents))
