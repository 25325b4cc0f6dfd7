"""Lets tools that look for setup.py find the package; pyproject.toml describes it."""

from setuptools import setup

setup()
