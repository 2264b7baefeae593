"""Public ports: HTTP with limits on connections, and signed requests, for the coordinator and the authority."""
