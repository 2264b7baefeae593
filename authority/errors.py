"""Errors of the enrolment authority.

AuthorityError
├── NotAttested     evidence does not show that a key is a device's
├── BeaconRefused   the authority does not draw a beacon: for this coordinator, or a second time for a device
├── BadSecret       the enrolment secret cannot be read, or is too short to be one
├── BadAndroidFile  the file that says which Android phones are accepted, or one that it names, cannot be used
├── BadAppleFile    the file that says which iOS devices are accepted, or one that it names, cannot be used
├── KeyMissing      there is no file of the authority's key
└── InvalidSettings a setting of the authority is not what it may be
"""


class AuthorityError(Exception):
    """Base of every error raised by `authority`."""


class NotAttested(AuthorityError):
    """Evidence does not show that a key is a device's."""


class BeaconRefused(AuthorityError):
    """The authority does not draw a beacon: for this coordinator, or a second time for a device."""


class BadSecret(AuthorityError):
    """The enrolment secret cannot be read, or is too short to be one."""


class BadAndroidFile(AuthorityError):
    """The file that says which Android phones are accepted, or one that it names, cannot be used."""


class BadAppleFile(AuthorityError):
    """The file that says which iOS devices are accepted, or one that it names, cannot be used."""


class KeyMissing(AuthorityError):
    """There is no file of the authority's key."""


class InvalidSettings(AuthorityError):
    """A setting of the authority is not what it may be."""
