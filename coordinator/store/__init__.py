"""Durable state: tables, typed rows, transactions."""
