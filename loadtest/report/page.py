"""A report as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from flyspec_lab.drawing import to_svg
from loadtest.report.base import LabReport, Table

STYLE = """
body { font: 15px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; color: #222;
  margin: 2rem auto; max-width: 1240px; padding: 0 1rem; background: #fff }
h1 { font-size: 1.5rem; margin: 0 } h2 { font-size: 1.1rem; margin: 2.2rem 0 .5rem }
.sub { color: #666; margin: .2rem 0 1rem }
.verdict { display: inline-block; padding: .15rem .7rem; border-radius: 4px; font-weight: 600;
  color: #fff; background: #2b7a3d } .verdict.broken { background: #b2182b }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: 12.5px }
th, td { padding: .22rem .45rem; text-align: right; border-bottom: 1px solid #e5e5e5;
  white-space: nowrap } th { color: #666; font-weight: 600 }
th.name, td.name { text-align: left } td.bad { color: #b2182b; font-weight: 600 }
figure { margin: 1rem 0 } figure svg { width: 100%; height: auto }
figcaption { color: #666; font-size: 13px } ul { padding-left: 1.2rem }
dl { font-size: 13px; display: grid; grid-template-columns: max-content 1fr; gap: .2rem 1rem }
dt { font-weight: 600 } dd { margin: 0 } code { font-size: 13px; overflow-wrap: anywhere }
"""


def page(report: LabReport) -> str:
    document, title = report.document, escape(report.title)
    verdict = ("", "passed") if report.passed else (" broken", "failed")
    parts = [
        f'<h1>{title} <span class="verdict{verdict[0]}">{verdict[1]}</span></h1>',
        f'<p class="sub">{"<br>".join(map(escape, report.about))}</p>',
        _list([*report.lines(), *(f"Warning: {w}" for w in document["warnings"])]),
    ]
    for table in report.tables():
        parts += [f"<h2>{escape(table.title)}</h2>", _table(table)]
    parts += ["<h2>Checks</h2>", _checks(document["checks"])]
    for index, plot in enumerate(report.plots()):
        svg = to_svg(plot.inches, plot.draw, salt=f"plot{index}")
        parts += [
            f"<h2>{escape(plot.title)}</h2>",
            f"<figure>{svg[svg.index('<svg') :]}<figcaption>{escape(plot.caption)}</figcaption>"
            "</figure>",
        ]
    if report.words:
        words = "".join(f"<dt>{escape(w)}</dt><dd>{escape(m)}</dd>" for w, m in report.words)
        parts += ["<h2>Words</h2>", f"<dl>{words}</dl>"]
    options = " ".join(f"{k}={v}" for k, v in document["options"].items())
    parts += ["<h2>Options</h2>", f"<p><code>{escape(options)}</code></p>"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head><body>\n"
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def _list(items: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _table(table: Table) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        return "".join(
            f"<{tag}{' class=name' if i < table.left else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    return f'<div class="scroll"><table><tr>{cells("th", table.columns)}</tr>{lines}</table></div>'


def _checks(checks: Sequence[dict[str, Any]]) -> str:
    lines = "".join(
        f'<tr><td class="name{"" if c["passed"] else " bad"}">{"ok" if c["passed"] else "broken"}'
        f'</td><td class="name">{escape(c["name"])}</td><td class="name">{escape(c["said"])}</td>'
        "</tr>"
        for c in checks
    )
    return f"<table>{lines}</table>"
