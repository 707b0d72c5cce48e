"""Faults on purpose: `python -m loadtest.chaos` kills, stops and cuts off services under load.

`fleet` starts replicas behind proxies, `faults` disturbs them, `work` keeps asking for texts,
`replay` judges again what was judged loosely, `run` combines them, and `report` has the results.
"""
