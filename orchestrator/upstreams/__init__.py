"""Connections to the draft and verify services.

`protocol` defines the interface in plain values; `connection`, `draft` and `verify` implement it
with gRPC and protobuf.
"""
