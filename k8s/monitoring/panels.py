"""Queries in PromQL, panels and dashboards, built with Grafana's Foundation SDK."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import count

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models import dashboard as models

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
VARIABLES = {
    "namespace": "flyspec_generation_slots",
    "drafter": "flyspec_rounds_total",
    "rule": "flyspec_rounds_total",
}
"""Labels to select by, each with a metric that has it."""

Panel = stat.Panel | timeseries.Panel
Query = tuple[str, str]
"""PromQL and a legend."""
NS = 'namespace=~"$namespace"'
BY = f'{NS},drafter=~"$drafter"'
RULED = f'{BY},rule=~"$rule"'
RATE = "$__rate_interval"


def quantile(q: float, metric: str, selector: str, by: str = "") -> str:
    """Quantile of a histogram over all selected series."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', selector, labels)})"


def rate(metric: str, selector: str, by: str = "") -> str:
    """Increase per second, summed."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{selector}}}[{RATE}]))"


def ratio(over: str, under: str, selector: str, by: str = "") -> str:
    """One rate divided by another."""
    return f"{rate(over, selector, by)} / {rate(under, selector, by)}"


def quantiles(metric: str, selector: str) -> list[Query]:
    """Median, p95 and p99, with legends."""
    return [(quantile(q, metric, selector), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def labelled(query: str, labels: str) -> list[Query]:
    """A query whose series are told apart by labels, with a legend of those."""
    return [(query, " ".join(f"{{{{{label}}}}}" for label in labels.split(", ")))]


def rates(metric: str, selector: str, labels: str) -> list[Query]:
    """`rate` by labels, with a legend."""
    return labelled(rate(metric, selector, labels), labels)


def ratios(over: str, under: str, selector: str, labels: str) -> list[Query]:
    """`ratio` by labels, with a legend."""
    return labelled(ratio(over, under, selector, labels), labels)


def number(title: str, description: str, query: str, unit: str = "short", **limits: float) -> Panel:
    """One number; `limits` as for `graph`."""
    panel = stat.Panel().span(4).height(4).color_mode(options.BigValueColorMode.VALUE)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.THRESHOLDS))
    return _filled(panel, title, description, [(query, "")], unit, **limits)


def graph(
    title: str,
    description: str,
    queries: Iterable[Query],
    unit: str = "short",
    *,
    width: int = 8,
    stack: bool = False,
    **limits: float,
) -> Panel:
    """Curves; `limits` may have `red_above` or `red_below`, beyond which values are red."""
    stacking = options.StackingMode.NORMAL if stack else options.StackingMode.NONE
    style = options.GraphThresholdsStyleMode
    tooltip = common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI)
    panel = timeseries.Panel().span(width).height(7).fill_opacity(25 if stack else 5)
    panel.show_points(options.VisibilityMode.NEVER)
    panel.stacking(common.StackingConfig().mode(stacking))
    panel.tooltip(tooltip.sort(options.SortOrder.DESCENDING))
    panel.legend(common.VizLegendOptions().show_legend(True))
    panel.thresholds_style(
        common.GraphThresholdsStyleConfig().mode(style.LINE if limits else style.OFF)
    )
    return _filled(panel, title, description, queries, unit, **limits)


def _filled(
    panel: Panel,
    title: str,
    description: str,
    queries: Iterable[Query],
    unit: str,
    red_above: float | None = None,
    red_below: float | None = None,
) -> Panel:
    steps = [models.Threshold(None, "green")]
    if red_above is not None:
        steps.append(models.Threshold(red_above, "red"))
    if red_below is not None:
        steps = [models.Threshold(None, "red"), models.Threshold(red_below, "green")]
    panel.title(title).description(description).datasource(SOURCE).unit(unit).min(0)
    panel.thresholds(dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(steps))
    for name, (query, legend) in zip("ABC", queries, strict=False):
        target = prometheus.Dataquery().ref_id(name).expr(query)
        panel.with_target(target.legend_format(legend or "__auto"))
    return panel


def build(uid: str, title: str, rows: Mapping[str, Iterable[Panel]]) -> models.Dashboard:
    """A dashboard of rows; the panels of a row add up to whole lines, 24 wide."""
    board = dashboard.Dashboard(title).uid(uid).tags(["flyspec"]).readonly().refresh("30s")
    board.time("now-1h", "now").tooltip(models.DashboardCursorSync.CROSSHAIR)
    link = dashboard.DashboardLink("flyspec").type(models.DashboardLinkType.DASHBOARDS)
    link.icon("external link").tags(["flyspec"]).include_vars(True).keep_time(True)
    board.link(link)
    board.with_variable(
        dashboard.DatasourceVariable("datasource").type("prometheus").label("Prometheus")
    )
    for label, metric in VARIABLES.items():
        query: dict[str, object] = {"query": f"label_values({metric}, {label})", "refId": label}
        variable = dashboard.QueryVariable(label).query(query)
        variable.datasource(SOURCE).refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        variable.multi(True).include_all(True).all_value(".*")
        variable.current(models.VariableOption(text="All", value="$__all"))
        board.with_variable(variable)
    identifiers = count(1)
    for heading, panels in rows.items():
        board.with_row(dashboard.Row(heading).id(next(identifiers)))
        for panel in panels:
            board.with_panel(panel.id(next(identifiers)))
    return board.build()
