"""The server's end of a secure round."""
