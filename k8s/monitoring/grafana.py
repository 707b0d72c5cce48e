"""What Grafana takes: dashboards of rows of panels, laid out, as the documents it reads.

What the panels show is in on_call.py and services.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH = 24


@dataclass(frozen=True)
class Panel:
    """A panel; `queries` pairs PromQL with a legend. `help_` is what it answers."""

    title: str
    help_: str
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stack: bool = False
    red_above: float | None = None
    red_below: float | None = None


@dataclass(frozen=True)
class Row:
    """A headline and the panels below it."""

    title: str
    panels: Sequence[Panel]


def stat(title: str, help_: str, query: str, unit: str = "short", **more: Any) -> Panel:
    """One number."""
    return Panel(title, help_, [(query, "")], unit, "stat", width=4, height=4, **more)


def one(title: str, help_: str, query: str, by: str, unit: str = "short", **more: Any) -> Panel:
    """A line for each value of the labels `by`."""
    legend = " ".join(f"{{{{{label}}}}}" for label in by.split(", "))
    return Panel(title, help_, [(query, legend)], unit, **more)


def dashboard(uid: str, title: str, rows: Iterable[Row]) -> dict[str, Any]:
    """The document that Grafana takes."""
    panels: list[dict[str, Any]] = []
    y = 0
    for row in rows:
        panels.append(_head(len(panels) + 1, row.title, y))
        y += 1
        x = tallest = 0
        for panel in row.panels:
            if x + panel.width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panels.append(_panel(len(panels) + 1, panel, x, y))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return {
        "uid": uid,
        "title": title,
        "tags": ["flyspec"],
        "editable": False,
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "links": [
            {
                "type": "dashboards",
                "title": "flyspec",
                "tags": ["flyspec"],
                "url": "",
                "icon": "external link",
                "tooltip": "",
                "targetBlank": False,
                "asDropdown": False,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": _variables()},
        "panels": panels,
    }


def _variables() -> list[dict[str, Any]]:
    """What can be chosen at the top: a data source, and values of labels."""
    found: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    ]
    for name, metric in (
        ("namespace", "flyspec_generation_slots"),
        ("drafter", "flyspec_rounds_total"),
        ("rule", "flyspec_rounds_total"),
    ):
        found.append(
            {
                "name": name,
                "type": "query",
                "datasource": DATASOURCE,
                "query": {"query": f"label_values({metric}, {name})", "refId": name},
                "refresh": 2,
                "includeAll": True,
                "multi": True,
                "allValue": ".*",
                "current": {"text": "All", "value": "$__all"},
            }
        )
    return found


def _head(identifier: int, title: str, y: int) -> dict[str, Any]:
    return {
        "id": identifier,
        "type": "row",
        "title": title,
        "collapsed": False,
        "panels": [],
        "gridPos": {"h": 1, "w": WIDTH, "x": 0, "y": y},
    }


def _panel(identifier: int, panel: Panel, x: int, y: int) -> dict[str, Any]:
    steps: list[dict[str, Any]] = [{"color": "green", "value": None}]
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
    if panel.kind == "timeseries":
        custom = {"fillOpacity": 25 if panel.stack else 5, "showPoints": "never"}
        custom["stacking"] = {"mode": "normal" if panel.stack else "none"}
        limited = panel.red_above is not None or panel.red_below is not None
        custom["thresholdsStyle"] = {"mode": "line" if limited else "off"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": identifier,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.help_,
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {
                "unit": panel.unit,
                "min": 0,
                "custom": custom,
                "thresholds": {"mode": "absolute", "steps": steps},
                **({"color": {"mode": "thresholds"}} if panel.kind == "stat" else {}),
            },
            "overrides": [],
        },
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend or "__auto",
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }
