"""Measurements of a running stack: speed, accuracy, exactness. Talks to it as any client does."""
