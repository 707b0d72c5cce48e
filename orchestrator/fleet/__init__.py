"""The draft and verify services: discovery, health checks and replica selection.

`fleet` is the entry point. `discovery` finds addresses, `breaker` decides when to retry failed
services, `handshake` checks compatibility, `replicas` watches the replicas of one service and
chooses among them, `drafters` is the registry of drafters, managed by the operator.
"""
