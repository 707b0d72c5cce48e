"""Faults on purpose: `python -m bench.chaos` kills, holds, drains and cuts services under load.

`fleet` starts replicas behind proxies, `faults` hurts them, `work` keeps asking for texts, `replay`
judges once more what was judged loosely, `run` puts it together and `report` says what came of it.
"""
