"""Options of commands as values: one module for each grammar, and those of whole commands."""
