"""Pages for whoever watches the service: made here, changed by nobody, and readable on a phone."""
