"""Torch code that the draft and the verify service share: runner, slot cache, keyed sampling."""
