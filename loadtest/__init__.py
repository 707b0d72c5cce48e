"""The laboratory: load tests with locust, faults under load, hostile input, and their reports.

`python -m loadtest SCENARIO --address HOST:PORT` tests an installation, `python -m loadtest.bundled
SCENARIO` the bundled pair on this machine, `python -m loadtest.chaos` disturbs a fleet, and `python
-m loadtest.fuzz` sends hostile input. See docs/load.md and docs/reliability.md.

Locust patches the standard library for gevent. Only what must know locust imports it: `__main__`,
`bundled`, `users` and `locustfile`; everything else may be imported anywhere.
"""
