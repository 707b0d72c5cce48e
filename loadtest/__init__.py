"""Load tests of a running flyspec, with locust: scenarios, measurements, a report.

`python -m loadtest SCENARIO --address HOST:PORT` tests an installation, `python -m loadtest.bundled
SCENARIO` the bundled pair on this machine. docs/load.md says how, and what the figures mean.

Locust patches the standard library for gevent. Only what must know locust imports it: `__main__`,
`run`, `users` and `locustfile`; everything else here is plain and may be imported anywhere.
"""
