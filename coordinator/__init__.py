"""The coordinator: check-in, selection, rounds, aggregation and their durable state, as one service."""
