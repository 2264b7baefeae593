"""Routes of devices: assignments, models, deltas, uploads and reports."""
