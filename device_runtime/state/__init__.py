"""What a device keeps on disk."""
