"""The core that coordinator, device and simulator share: vectors, plans, reports, algorithms, messages."""
