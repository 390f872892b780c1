"""Experiments: scripts behind the pages of docs/results. Not part of the package."""
