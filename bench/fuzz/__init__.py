"""Hostile input: generated messages against running servers (`python -m bench.fuzz`).

The generator is seeded and its own: hypothesis draws a few hundred such messages a second and none
while it waits for a server, and what it is best at, shrinking, needs only the recorded script here.
"""
