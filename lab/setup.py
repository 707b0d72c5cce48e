"""The version, which is flyspec's; pyproject.toml has everything else."""

from runpy import run_path

from setuptools import setup

VERSION = run_path("flyspec_lab/version.py")["__version__"]  # a link to flyspec/version.py

setup(
    version=VERSION,
    install_requires=[
        f"flyspec=={VERSION}",
        "matplotlib>=3.9",
        "numpy>=2.0",
        "pyarrow>=20",
        "scikit-learn>=1.6",
        "scipy>=1.15",
    ],
)
