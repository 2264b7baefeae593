"""Checks that fleet, coordinator and engine agree."""
