"""The report as one HTML file: nothing is loaded from elsewhere."""

from __future__ import annotations

from html import escape
from typing import Any

from flyspec.drawing import to_svg
from loadtest.report.figures import plots
from loadtest.report.text import highlights, table

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

WORDS = (
    ("TTFT", "time to first token: from when a request was due to its first tokens"),
    ("TPOT", "time per output token: from the first tokens to the end, over the tokens less one; "
             "a mean over each request, since a message brings several"),
    ("end to end", "from when a request was due to its end"),
    ("done", "completed; only these have times"),
    ("refused", "for want of room, with when to ask again; not a failure"),
    ("given up", "by its own client, on purpose"),
    ("failed", "everything else that was not completed"),
    ("requests/s, tokens/s", "of completed requests, each counted for the share of its time that "
                             "lies in the phase, its first tenth left out"),
    ("tokens/round", "emitted tokens for each forward of the target"),
    ("goodput", "share of the requests, those given up left out, that were completed within the "
                "latency goals"),
)  # fmt: skip


def page(document: dict[str, Any]) -> str:
    """The whole page."""
    broken = not document["passed"]
    verdict = f'<span class="verdict{" broken" if broken else ""}">' + (
        "failed" if broken else "passed"
    )
    server = document["server"]
    about = (
        f"{document['begun']} · {document['seconds']:.0f} s · {server['target']} "
        f"({server['dtype']}, {server['device']})"
    )
    parts = [
        f"<h1>flyspec load test: {escape(document['scenario'])} {verdict}</span></h1>",
        f'<p class="sub">{escape(document["about"])}<br>{escape(about)}</p>',
        _list(highlights(document) + [f"Warning: {w}" for w in document["warnings"]]),
        "<h2>Phases</h2>",
        _table(*table(document)),
        "<h2>Checks</h2>",
        _checks(document["checks"]),
    ]
    for index, plot in enumerate(plots(document)):
        svg = to_svg(plot.inches, plot.draw, salt=f"plot{index}")
        parts += [
            f"<h2>{escape(plot.title)}</h2>",
            f"<figure>{svg[svg.index('<svg') :]}<figcaption>{escape(plot.caption)}</figcaption>"
            "</figure>",
        ]
    words = "".join(f"<dt>{escape(w)}</dt><dd>{escape(m)}</dd>" for w, m in WORDS)
    parts += ["<h2>Words</h2>", f"<dl>{words}</dl>"]
    options = " ".join(f"{k}={v}" for k, v in document["options"].items())
    parts += ["<h2>Options</h2>", f"<p><code>{escape(options)}</code></p>"]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>flyspec load test: {escape(document['scenario'])}</title>"
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _list(items: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>" if items else ""


def _table(columns: Any, body: Any) -> str:
    def cells(tag: str, row: Any) -> str:
        return "".join(
            f"<{tag}{' class=name' if i < 2 else ''}>{escape(cell)}</{tag}>"
            for i, cell in enumerate(row)
        )

    lines = "".join(f"<tr>{cells('td', row)}</tr>" for row in body)
    return f'<div class="scroll"><table><tr>{cells("th", columns)}</tr>{lines}</table></div>'


def _checks(checks: list[dict[str, Any]]) -> str:
    lines = "".join(
        f'<tr><td class="name{"" if c["passed"] else " bad"}">{"ok" if c["passed"] else "broken"}'
        f'</td><td class="name">{escape(c["name"])}</td><td class="name">{escape(c["said"])}</td>'
        "</tr>"
        for c in checks
    )
    return f"<table>{lines}</table>"
