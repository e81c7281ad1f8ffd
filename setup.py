"""Installs configs/ and launch/ inside podrl, as podrl.configs and podrl.launchers; all else is in pyproject.toml."""

from setuptools import find_packages, setup

INSIDE = {"podrl.configs": "configs", "podrl.launchers": "launch"}

setup(packages=[*find_packages(include=["podrl", "podrl.*"]), *INSIDE], package_dir=INSIDE)
