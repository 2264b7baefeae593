"""What the coordinator, the device and the simulator must agree on: vectors, plans, reports, algorithms, messages."""
