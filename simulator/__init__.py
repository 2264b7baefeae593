"""A fleet of emulated devices over the real protocol, and a vectorised engine; they agree with each other."""
