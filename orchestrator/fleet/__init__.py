"""The services behind the orchestrator: where they are, which of them work, who gets which.

`discovery` says which addresses there are, `breaker` whether a failed one is tried again,
`replicas` keeps and chooses among those of one service, `drafters` knows the drafters by name and
what the operator does with them.
"""
