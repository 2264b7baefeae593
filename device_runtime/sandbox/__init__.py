"""The sandbox: a separate, limited process in which a plan's graphs run. Why: docs/decisions/0030-sandbox.md."""
