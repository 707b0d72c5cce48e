"""Hostile messages to running servers and large bodies: `python -m loadtest.fuzz`.

A few valid sessions are changed by the descriptors of their messages; descriptors and declared
ranges also tell what is a mistake. Nothing here lists mistakes.
"""
