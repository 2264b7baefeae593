"""Engines: what trains the clients of a cohort, in one of several ways that agree to round-off."""
