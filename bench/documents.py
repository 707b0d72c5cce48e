"""`python -m bench.documents`: tables and plots of a document, from JSON reports in a folder.

A document says itself what it shows. Between <!-- measured NAME... --> and its end, the same with
a slash, are the tables of the reports FOLDER/NAME.json, those of equal columns as one; between
<!-- plotted KIND NAME... --> is a plot of reports of `flyspec bench` (`bench.plots`). Names may
have wildcards. After `: ` comes the heading of the only section to show.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.plots import PLOTS
from flyspec.cli.options import with_flags
from flyspec.cli.program import run, single
from flyspec.errors import ConfigError
from flyspec.flags import Flag
from flyspec.tables import FittedTable
from flyspec_lab.report import joined, markdown, write_into

Documents = Mapping[str, Mapping[str, Any]]
"""Reports by their names."""
_MARK = re.compile(r"<!-- ((measured|plotted) (.*?)) -->\n")


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
    shown = "" if heading else "\n".join(facts)
    parts = [shown, markdown(joined(tables)), *dict.fromkeys(text), *plots]
    return "\n\n".join(part for part in parts if part)


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
    marks = _MARK.findall(document.read_text())
    if not marks:
        raise ConfigError(f"--document {document}: has no <!-- measured NAME --> mark")
    images, parts = document.parent / "images" / document.stem, {}
    images.parent.mkdir(exist_ok=True)
    for mark, kind, rest in marks:
        named, _, heading = rest.partition(": ")
        names = named.split()
        if kind == "measured":
            found = read_documents(folder, names)
            parts[mark] = measured_part(folder, found, heading, images) if found else None
        else:
            plot = PLOTS[names[0]](list(read_documents(folder, names[1:]).values()))
            if plot is not None:
                file = images.with_name(f"{images.name}-{plot.name}.svg")
                file.write_text(plot.svg)
            parts[mark] = f"![{plot.caption}](images/{file.name})" if plot else None
    if not any(parts.values()):
        raise ConfigError(f"{folder}: has none of the reports that {document} shows")
    write_into(document, parts)
    print(f"wrote {document}")


if __name__ == "__main__":
    run(single(documents))
