"""The dashboard: read-only pages for operators, made by the server and readable on a phone."""
