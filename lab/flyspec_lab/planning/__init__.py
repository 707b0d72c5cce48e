"""Capacity planning: tokens per second of a deployment, calculated from a bench's measurements.

`acceptance`: rounds of a text at any K. `measured`: what a bench measures for it. `queueing`: how
long rounds take when requests share devices. `plan`: all of it together. No torch, no clocks.
"""
