"""The services behind the orchestrator: where they are, which of them work, who gets which.

`fleet` is all of them; `discovery` says which addresses there are, `breaker` whether a failed one
is tried again, `handshake` whether it fits; `replicas` keeps and chooses among those of one
service, `drafters` knows the drafters by name and what the operator does with them.
"""
