"""The driver: the one thread that runs the rounds, and its parts."""
