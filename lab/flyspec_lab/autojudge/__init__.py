"""Trains judges for the rule `autojudge`: `mining` makes labels, `training` a judge of them.

The method is AutoJudge's (arXiv 2504.20039; its code is garipovroma/autojudge).
"""
