"""The simulator: a vectorised engine, and a fleet of emulated devices on the real protocol that agrees with it."""
