"""`python -m bench.documents`: tables and plots of a document, from the reports that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.documents import documents
from flyspec.cli.json_output import to_json
from flyspec.errors import ConfigError
from flyspec.tables import make_table
from flyspec_lab.report import Part, Plot, Report, Section

MACHINE = {"processor": "CPU 9000", "cores": 2, "accelerator": "", "versions": {"torch": "2.0"}}


def write(folder: Path, name: str, *parts: Part, **document: Any) -> None:
    (folder / f"{name}.json").write_text(Report(document, parts).json())


def study(folder: Path, holds: str, accuracy: str) -> None:
    claims = [["W = 0 loses", "FLy", holds, f"recovery {accuracy}"]]
    folder.mkdir(parents=True)
    Report(
        {},
        [
            Section("What papers report", ["What it means."], [
                make_table(["claim", "source", "holds", "figures here"], claims, left=4),
            ]),
            Section("words", [], [
                make_table(["rule", "correct"], [["fly", accuracy]], "words, 10 problems"),
            ], [Plot("words-quality", "What is kept.", lambda figure: None)]),
        ],
        facts={"problems": "10 of words"},
    ).write(folder)  # fmt: skip


def marked(*names: str) -> str:
    return "\n".join(f"<!-- {name} -->\nold\n<!-- /{name} -->" for name in names)


def test_tables_of_several_reports_are_joined(tmp_path: Path) -> None:
    for name, ratio in (("plain-a", "1.50"), ("plain-b", "0.90")):
        table = make_table(["mode", "x plain"], [["fly", ratio]], f"{name} words")
        write(tmp_path, name, table, "x plain: rate.", command=["flyspec", "bench"],
              machine=MACHINE)  # fmt: skip
    write(tmp_path, "other", make_table(["rule", "ms"], [["fly", "5.00"]], "round"))
    document = tmp_path / "page.md"
    document.write_text("Text.\n" + marked("measured plain-*", "measured other", "measured no"))
    documents(folder=tmp_path, document=document)
    text = document.read_text()
    for expected in (
        "Text.\n<!-- measured plain-* -->\n\n- plain-a: `flyspec bench`; CPU 9000, 2 cores, torch",
        "|  | mode | x plain |\n| --- | --- | ---: |\n| plain-a: plain-a words | fly | 1.50 |\n"
        "| plain-b: plain-b words | fly | 0.90 |\n\nx plain: rate.\n",
        "round:\n\n| rule | ms |\n| --- | ---: |\n| fly | 5.00 |\n",
        "<!-- measured no -->\nold\n",
    ):
        assert expected in text, expected
    assert text.count("x plain: rate.") == 1
    documents(folder=tmp_path, document=document)
    assert document.read_text() == text


def test_pairs_of_studies_stand_beside_each_other(tmp_path: Path) -> None:
    study(tmp_path / "one" / "window", "yes", "98 %")
    study(tmp_path / "two" / "window", "open", "97 %")
    document = tmp_path / "quality.md"
    claims = "measured */*/report: What papers report"
    document.write_text(marked(claims, "measured */window/report"))
    documents(folder=tmp_path, document=document)
    text = document.read_text()
    for expected in (
        "| one/window | W = 0 loses | FLy | yes | recovery 98 % |\n| two/window | W = 0",
        "- two/window: problems 10 of words",
        "| one/window: words, 10 problems | fly | 98 % |",
        "![What is kept.](images/quality-two-window-words-quality.svg)",
    ):
        assert expected in text, expected
    assert "<svg" in (tmp_path / "images" / "quality-one-window-words-quality.svg").read_text()


def test_mistakes_are_named(tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    with pytest.raises(ConfigError, match=r"page\.md: no such file"):
        documents(folder=tmp_path, document=document)
    document.write_text("Text.")
    with pytest.raises(ConfigError, match="has no <!-- measured NAME --> mark"):
        documents(folder=tmp_path, document=document)
    document.write_text(marked("measured a"))
    with pytest.raises(ConfigError, match="has none of the reports"):
        documents(folder=tmp_path, document=document)
    (tmp_path / "a.json").write_text(to_json({"report": {"facts": {}, "sections": []}})[:-1])
    with pytest.raises(ConfigError, match=r"a\.json: not JSON"):
        documents(folder=tmp_path, document=document)
