"""Engines that run a plan's graphs; one per graph format."""
