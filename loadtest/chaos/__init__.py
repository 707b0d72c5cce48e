"""Fault injection: `python -m loadtest.chaos` kills, stops and cuts off services under load.

`fleet` starts replicas behind proxies, `faults` disturbs them, `work` keeps sending requests,
`replay` judges lossy texts again, `run` combines them, and `report` presents the results.
"""
