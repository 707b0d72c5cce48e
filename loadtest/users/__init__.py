"""Locust users (`loops`) and the protocols that they use (`grpc`).

Another protocol needs a module next to `grpc` that implements `loadtest.transport`.
"""
