"""The services behind the orchestrator: what is needed of them, and how that goes over gRPC.

`protocol` is the seam, in plain values: the other rooms know nothing else. `connection`, `draft`
and `verify` are gRPC and protobuf.
"""
