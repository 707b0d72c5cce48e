"""A study's report: sections of text, tables and plots, as one HTML file and as data."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment
from markupsafe import Markup

from flyspec.tables import FittedTable
from flyspec_lab.drawing import to_svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PagePlot:
    """A figure of `inches` (width, height); `caption` says what it shows, in a sentence."""

    name: str
    caption: str
    draw: Callable[[Figure], None]
    inches: tuple[float, float] = (7.2, 4.0)


@dataclass(frozen=True)
class PageSection:
    """Text in paragraphs, where `code` is set in backticks, then tables, then plots."""

    heading: str
    paragraphs: Sequence[str] = ()
    tables: Sequence[FittedTable] = ()
    plots: Sequence[PagePlot] = ()


@dataclass(frozen=True)
class Page:
    """A report. `command` makes it again; `facts` say what it was measured with, by name."""

    title: str
    question: str
    command: str
    facts: dict[str, str] = field(default_factory=dict)
    sections: Sequence[PageSection] = ()

    def to_html(self) -> str:
        """Return one file that needs no other: plots are drawn into it, nothing is fetched."""
        environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        environment.filters |= {"words": _words, "svg": _svg}
        return environment.from_string(_TEMPLATE).render(page=self)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as JSON can hold it, without its plots' drawings."""
        return {
            "title": self.title,
            "question": self.question,
            "command": self.command,
            "facts": self.facts,
            "sections": [
                {
                    "heading": section.heading,
                    "paragraphs": list(section.paragraphs),
                    "tables": [
                        {
                            "title": table.title,
                            "columns": list(table.columns),
                            "rows": [[str(cell) for cell in row] for row in table.rows],
                            "left": table.left,
                        }
                        for table in section.tables
                    ],
                    "plots": [{"name": p.name, "caption": p.caption} for p in section.plots],
                }
                for section in self.sections
            ],
        }

    def write(self, directory: Path) -> Path:
        """Write `report.html`, and the same as `page.json` and NAME.svg; return the first."""
        file = directory / "report.html"
        file.write_text(self.to_html())
        (directory / "page.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        for plot in (plot for section in self.sections for plot in section.plots):
            drawn = to_svg(plot.inches, plot.draw, plot.name)
            (directory / f"{plot.name}.svg").write_text(drawn)
        return file


def _words(text: str) -> Markup:
    """Escape a text; what is in backticks becomes code."""
    pieces = re.split(r"`([^`]*)`", text)
    return Markup("").join(
        Markup("<code>{}</code>").format(piece) if i % 2 else piece
        for i, piece in enumerate(pieces)
    )


def _svg(plot: PagePlot) -> Markup:
    drawn = to_svg(plot.inches, plot.draw, plot.name)
    # Drawn by us, with text that matplotlib has escaped.
    return Markup(drawn[drawn.index("<svg") :])


_TEMPLATE = """<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ page.title }}</title>
<style>
  :root { color-scheme: light; }
  body { font: 16px/1.5 system-ui, sans-serif; color: #1c1c1c; background: #fff;
         max-width: 62rem; margin: 2rem auto; padding: 0 1.25rem; }
  h1 { font-size: 1.6rem; line-height: 1.25; margin-bottom: .25rem; }
  h2 { font-size: 1.2rem; margin-top: 2.25rem; }
  .question { font-size: 1.1rem; color: #444; margin-top: 0; }
  pre, code { font: .875em/1.4 ui-monospace, monospace; background: #f4f4f4; border-radius: 3px; }
  pre { padding: .6rem .8rem; overflow-x: auto; }
  code { padding: .1em .25em; }
  pre code { padding: 0; }
  dl { display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; font-size: .9rem; }
  dt { color: #666; }
  dd { margin: 0; }
  .wide { overflow-x: auto; margin: 1rem 0; }
  table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }
  caption { text-align: left; font-weight: 600; padding-bottom: .3rem; }
  th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #e5e5e5;
           white-space: nowrap; }
  th { border-bottom: 2px solid #999; font-weight: 600; }
  .left { text-align: left; white-space: normal; min-width: 7rem; }
  figure { margin: 1.25rem 0; }
  figure svg { max-width: 100%; height: auto; }
  figcaption { font-size: .9rem; color: #444; }
</style>
<h1>{{ page.title }}</h1>
<p class="question">{{ page.question | words }}</p>
<pre><code>{{ page.command }}</code></pre>
<dl>
{% for name, value in page.facts.items() %}
  <dt>{{ name }}</dt><dd>{{ value }}</dd>
{% endfor %}
</dl>
{% for section in page.sections %}
<h2>{{ section.heading }}</h2>
{% for paragraph in section.paragraphs %}
<p>{{ paragraph | words }}</p>
{% endfor %}
{% for table in section.tables %}
<div class="wide"><table>
{% if table.title %}
<caption>{{ table.title }}</caption>
{% endif %}
<thead><tr>
{% for column in table.columns %}
<th scope="col"{{ ' class="left"' | safe if loop.index <= table.left }}>{{ column }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr>
{% for cell in row %}
<td{{ ' class="left"' | safe if loop.index <= table.left }}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table></div>
{% endfor %}
{% for plot in section.plots %}
<figure role="img" aria-label="{{ plot.caption }}">{{ plot | svg }}
<figcaption>{{ plot.caption | words }}</figcaption></figure>
{% endfor %}
{% endfor %}
</html>
"""
