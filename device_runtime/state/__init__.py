"""State that a device keeps on disk."""
