"""Measurements of `flyspec bench`, and their tables.

The core is `speed`: a runner for a list of systems (`modes`) on groups of prompts (`prompts`), one
or several requests at a time, in blocks that alternate; `report` has medians, slowest prompts and
ratios of its samples.

Modules here may import services and torch: commands import them once they run, never before.
"""
