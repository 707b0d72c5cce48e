"""Decides which requests run, wait or are refused, independently of gRPC."""
