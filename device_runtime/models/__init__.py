"""Models that devices trained, for the app: versions that a release key signed, and predictions with them."""
