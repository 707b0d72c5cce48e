"""Steps of fixed shape: run eagerly anywhere, captured as graphs where a device can replay them.

A step's sizes are rounded up to those of a *shape* (`shapes`). What the host knows of it goes to
the device in one transfer. A *program* then runs the model and draws tokens without the host
(`program`), so that it can be captured once and replayed (`graphs`). `steps` joins them.
"""
