"""The driver's memory of rounds and devices: read from the store at start, and changed after each commit."""
