"""A device's end of the protocol with a coordinator."""
