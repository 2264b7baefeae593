"""A coordinator, its devices and a browser on this machine, for the demo and quick starts."""
