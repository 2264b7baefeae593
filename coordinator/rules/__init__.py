"""Rules of rounds, selection, pacing and leases: pure functions on values."""
