"""Differential privacy: what a task promises, the noise on the sums of its rounds, and what these have spent of it."""
