"""Who asks: locust users (`loops`) over a protocol (`transport`, `grpc`).

A user of another protocol needs a module beside `grpc` that implements `transport.Transport`.
"""
