"""A fleet of emulated devices that speak the real protocol."""
