"""Trains and measures draft heads: `texts` are what they learn from, `training` how, `measuring`
how many of the target's own tokens they guess."""
