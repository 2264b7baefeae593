"""Routes of operators: the admin API, its access and its problems."""
