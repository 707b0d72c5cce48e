"""Runs one generation, from a request to its events, in plain values; no gRPC, no torch."""
