"""Trains what a target needs of its own: draft heads, and judges for the rule `autojudge`.

Both learn from what the target writes to the problems of tasks. `head` trains by EAGLE-3's method
(`head_trainer`); `judge` by AutoJudge's (arXiv 2504.20039; its code is garipovroma/autojudge), from
labels that `mining` makes.
"""
