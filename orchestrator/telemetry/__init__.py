"""Metrics, traces and logs of generations and of the services they use."""
