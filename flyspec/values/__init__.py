"""The values that clients and services pass each other: no I/O, no protobuf, no torch.

`tokens`, `rounds`, `generation` and `admin` hold one class for each thing; `flyspec.wire` turns
them into protobuf messages and back.
"""
