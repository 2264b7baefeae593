"""What a device's owner allows."""
