"""Hostile input against running servers: `python -m loadtest.fuzz`.

Valid sessions of every method are changed by the descriptors of their messages; a mistake is known
as one from the descriptor and the declared ranges, too. Nothing here lists mistakes.

The generator is seeded and our own: hypothesis draws a few hundred such messages per second and
none while it waits for a server.
"""
