"""Checks of manifests and images, and what images and compose are built from."""
