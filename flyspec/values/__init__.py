"""The values that clients and services exchange: no I/O, no protobuf, no torch.

`flyspec.wire` converts them to protobuf messages and back. Positions are absolute (prompt
included), costs are in nats. Enums have the numbers of their namesakes in `protos/`.
"""
