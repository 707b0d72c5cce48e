"""Locust users (`loops`) and the protocols that they use (`grpc`, `http`).

Another protocol needs a module that implements `loadtest.transport`, and its name in `protocols`.
"""
