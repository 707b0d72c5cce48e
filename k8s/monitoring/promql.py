"""PromQL for the dashboards: common selectors, rates, quantiles and legends."""

from __future__ import annotations

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


def quantiles(metric: str, selector: str) -> list[tuple[str, str]]:
    """Median, p95 and p99, with legends."""
    return [(quantile(q, metric, selector), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]


def labelled(query: str, labels: str) -> list[tuple[str, str]]:
    """A query whose series are told apart by labels, with a legend of those."""
    return [(query, " ".join(f"{{{{{label}}}}}" for label in labels.split(", ")))]


def rates(metric: str, selector: str, labels: str) -> list[tuple[str, str]]:
    """`rate` by labels, with a legend."""
    return labelled(rate(metric, selector, labels), labels)


def ratios(over: str, under: str, selector: str, labels: str) -> list[tuple[str, str]]:
    """`ratio` by labels, with a legend."""
    return labelled(ratio(over, under, selector, labels), labels)
