"""Whole fleets on real coordinators, with every account of what happened compared."""
