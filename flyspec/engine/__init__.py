"""Torch code shared by the draft and verify services: runner, slot cache, keyed sampling."""
