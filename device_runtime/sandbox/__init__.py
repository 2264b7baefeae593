"""The sandbox: a process of its own, with limits, in which a plan's graphs run. Why: docs/decisions/0030-sandbox.md."""
