"""Secure rounds: the server's end of secure aggregation."""
