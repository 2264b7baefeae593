"""The driver's transactions, and the effects on memory that follow a commit."""
