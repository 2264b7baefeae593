"""Errors of ports.

IngressError
└── CannotListen    a port is taken, or cannot be opened for another reason
"""


class IngressError(Exception):
    """Base of every error raised by `ingress`."""


class CannotListen(IngressError):
    """A port is taken, or cannot be opened for another reason; the message names the option that changes it."""
