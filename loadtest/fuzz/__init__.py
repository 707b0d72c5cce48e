"""Hostile input against running servers: `python -m loadtest.fuzz`.

Valid sessions of every method are changed by the descriptors of their messages; descriptors and
declared ranges also tell what is a mistake. Nothing here lists mistakes.

The generator is our own: hypothesis draws a few hundred such messages per second, and none while it
waits for a server.
"""
