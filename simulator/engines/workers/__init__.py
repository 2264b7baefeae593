"""Processes that train clients for an engine: forked, or on a Ray cluster."""
