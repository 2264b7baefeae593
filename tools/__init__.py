"""Scripts that write generated files and test data, run from the repository's root: `python -m tools.NAME`."""
