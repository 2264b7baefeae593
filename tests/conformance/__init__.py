"""The conformance suite: drives the program of any device through what docs/spec/wire.md promises of devices."""
