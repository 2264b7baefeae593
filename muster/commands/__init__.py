"""One file per group of commands; each imports what it needs when it runs."""
