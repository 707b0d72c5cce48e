"""Datastores of texts for the drafter rest: their format and retrieval, and how they are built.

Retrieval needs neither torch nor numpy.
"""
