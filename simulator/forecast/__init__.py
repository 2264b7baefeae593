"""The twin: the coordinator's rules on a modelled population, in virtual time."""
