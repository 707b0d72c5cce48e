"""PromQL of the dashboards: what all panels select by, and rates and quantiles of it."""

from __future__ import annotations

NS = 'namespace=~"$namespace"'
BY = f'{NS},drafter=~"$drafter"'
RULED = f'{BY},rule=~"$rule"'
RATE = "$__rate_interval"


def quantile(q: float, metric: str, selector: str, by: str = "") -> str:
    """A quantile of a histogram over all that the selector finds."""
    labels = ", ".join(filter(None, ["le", by]))
    return (
        f"histogram_quantile({q}, sum by ({labels}) (rate({metric}_bucket{{{selector}}}[{RATE}])))"
    )


def rate(metric: str, selector: str, by: str = "") -> str:
    """Summed increase a second."""
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (rate({metric}{{{selector}}}[{RATE}]))"


def ratio(over: str, under: str, selector: str, by: str = "") -> str:
    """One rate over another."""
    return f"{rate(over, selector, by)} / {rate(under, selector, by)}"


def quantiles(metric: str, selector: str) -> list[tuple[str, str]]:
    """Median, p95 and p99."""
    return [(quantile(q, metric, selector), f"p{round(100 * q)}") for q in (0.5, 0.95, 0.99)]
