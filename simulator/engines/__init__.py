"""Engines: several implementations of training the clients of a cohort, which agree up to rounding."""
