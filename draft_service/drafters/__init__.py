"""Drafters, one per file; `base` has their common protocol."""
