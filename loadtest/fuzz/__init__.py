"""Hostile messages to running servers (`python -m loadtest.fuzz`), and large bodies (`.bodies`).

A few valid sessions are changed by the descriptors of their messages; descriptors and declared
ranges also tell what is a mistake. Nothing here lists mistakes.
"""
