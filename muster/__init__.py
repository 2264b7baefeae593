"""The command line: composition only."""
