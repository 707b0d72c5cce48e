"""`python -m bench.quality`: claims of all pairs in one table, each study in its part."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench.quality import quality
from flyspec_lab.studies.page import Page, PagePlot, PageSection
from flyspec_lab.studies.report import CLAIMS_HEADING

from flyspec.errors import ConfigError
from flyspec.tables import make_table


def write(folder: Path, study: str, holds: str, accuracy: str, asked: str = "problems") -> None:
    claims = [["W = 0 loses", "FLy", holds, f"recovery {accuracy}"]]
    (folder / study).mkdir(parents=True)
    Page(
        "A title", "A question?", "flyspec study", {asked: "10 of word_problems"},
        [
            PageSection(CLAIMS_HEADING, ["What it means."], [
                make_table(["claim", "source", "holds", "figures here"], claims, left=4),
            ]),
            PageSection("Figures", [], [
                make_table(["rule", "correct", "tok/s"], [["fly", accuracy, "9"]], "word_problems"),
                make_table(["requests", "fly over plain"], [["1", "1.13"]]),
            ], [PagePlot(f"{study}-quality", "What is kept.", lambda figure: None)]),
        ],
    ).write(folder / study)  # fmt: skip


def test_pairs_stand_beside_each_other(tmp_path: Path) -> None:
    write(tmp_path / "a", "window", "yes", "98 %")
    write(tmp_path / "b", "window", "open", "97 %", asked="requests")
    document = tmp_path / "quality.md"
    document.write_text(
        "<!-- claims -->\n<!-- /claims -->\nWindows.\n<!-- window -->\nold\n<!-- /window -->\n"
    )
    pairs = [f"one={tmp_path}/a", f"two={tmp_path}/b"]
    quality(pairs=pairs, document=document)
    text = document.read_text()
    assert "| claim | source | one | two |" in text
    assert "| W = 0 loses | FLy | **yes**: recovery 98 % | **open**: recovery 97 % |\n" in text
    for expected in (
        "Windows.\n<!-- window -->\n\n**one**: 10 of word_problems",
        "word_problems:\n\n| rule | correct |\n| --- | ---: |\n| fly | 98 % |",
        "**two**: 10 of word_problems",
        "| requests | fly over plain |\n| --- | ---: |\n| 1 | 1.13 |",
        "![What is kept.](images/quality-two-window-quality.svg)",
    ):
        assert expected in text
    assert "old" not in text
    assert "<svg" in (tmp_path / "images" / "quality-one-window-quality.svg").read_text()
    quality(pairs=pairs[:1], document=document)
    assert document.read_text() == text, "the other pair's report is kept"


def test_mistakes_are_named(tmp_path: Path) -> None:
    document = tmp_path / "quality.md"
    with pytest.raises(ConfigError, match=r"quality\.md: no such file"):
        quality(pairs=[f"one={tmp_path}"], document=document)
    document.write_text("")
    with pytest.raises(ConfigError, match="has no reports of `flyspec study`"):
        quality(pairs=[f"one={tmp_path}"], document=document)
    with pytest.raises(ConfigError, match="must be NAME=DIRECTORY"):
        quality(pairs=[str(tmp_path)], document=document)
    write(tmp_path / "a", "window", "yes", "98 %")
    with pytest.raises(ConfigError, match="has no <!-- claims --> and no study"):
        quality(pairs=[f"one={tmp_path}/a"], document=document)
