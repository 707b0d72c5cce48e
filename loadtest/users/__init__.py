"""Locust users (`loops`) and the protocols that they use (`grpc`, `http`).

Another protocol needs a module that implements `loadtest.load.Transport`, and its name in `loops`.
"""
