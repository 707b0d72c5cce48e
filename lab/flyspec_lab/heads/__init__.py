"""Trains and measures draft heads.

`texts` are what they learn from, `training` is the method, `train` and `measure` the commands.
"""
