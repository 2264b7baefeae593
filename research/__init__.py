"""Studies: published questions, put to small data sets. In a checkout `muster study` runs them."""
