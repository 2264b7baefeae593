"""The HTTP API. Spec: docs/spec/wire.md."""
