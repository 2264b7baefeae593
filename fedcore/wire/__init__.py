"""The device protocol's messages and problems. Spec: docs/spec/wire.md."""
