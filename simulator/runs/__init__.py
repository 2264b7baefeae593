"""Runs: simulations that keep their course in a folder, and go on from there after any end, to the same bits."""
