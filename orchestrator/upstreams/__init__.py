"""Streams to the draft and verify services: what they hold, deadlines, and opening them again.

A remote session is a cache (DESIGN, principle 1): when a stream is lost or holds another prefix,
the next call opens a new one with the whole sequence.
"""
