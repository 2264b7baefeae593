"""Curves and heat maps of runs and studies."""
