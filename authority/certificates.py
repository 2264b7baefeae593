"""Certificate chains, with which phone makers vouch for keys in their hardware."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.utils import CryptographyDeprecationWarning
from cryptography.x509.verification import Criticality, ExtensionPolicy, PolicyBuilder, Store, VerificationError

from authority.errors import NotAttested

UNREADABLE = (
    ValueError,
    TypeError,
    UnsupportedAlgorithm,
    CryptographyDeprecationWarning,
    x509.DuplicateExtension,
    x509.InvalidVersion,
)
"""Errors of reading untrusted certificates; warnings, if they are errors."""


@dataclass(frozen=True)
class Roots:
    """The certificates at which chains must end. longest: the most certificates of a chain, including its root."""

    certificates: tuple[x509.Certificate, ...]
    longest: int

    @classmethod
    def load(cls, path: Path, longest: int) -> Roots:
        """The certificates of a PEM file. Raises OSError, or ValueError when there are none."""
        return cls(tuple(x509.load_pem_x509_certificates(path.read_bytes())), longest)

    def verify(self, chain: Sequence[bytes], now: int) -> list[x509.Certificate]:
        """The certificates of a chain (DER, leaf first), after checking signatures, dates and the right to sign.

        now: seconds since 1970. Raises NotAttested.
        """
        try:
            leaf, *others = map(x509.load_der_x509_certificate, chain)
            verifier = self._rules.time(dt.datetime.fromtimestamp(now, dt.UTC)).build_client_verifier()
            return verifier.verify(leaf, others).chain
        except VerificationError as error:
            raise NotAttested(f"the chain of certificates leads to no root that is known here: {error}") from error
        except UNREADABLE as error:
            raise NotAttested(f"the chain of certificates cannot be read: {error}") from error

    @cached_property
    def _rules(self) -> PolicyBuilder:
        may_sign = (
            ExtensionPolicy.permit_all()
            .require_present(x509.BasicConstraints, Criticality.AGNOSTIC, None)
            .require_present(x509.KeyUsage, Criticality.AGNOSTIC, _signs_certificates)
        )
        return (
            PolicyBuilder()
            .store(Store(list(self.certificates)))
            .max_chain_depth(self.longest - 2)
            .extension_policies(ca_policy=may_sign, ee_policy=ExtensionPolicy.permit_all())
        )


def extension_of(certificate: x509.Certificate, oid: x509.ObjectIdentifier, what: str) -> bytes:
    """An extension in DER. what: a description of it. Raises NotAttested when there is none."""
    try:
        return certificate.extensions.get_extension_for_oid(oid).value.public_bytes()
    except x509.ExtensionNotFound as error:
        raise NotAttested(f"the first certificate has no {what}") from error


def _signs_certificates(_: Any, __: x509.Certificate, usage: x509.KeyUsage) -> None:
    if not usage.key_cert_sign:
        raise ValueError("a certificate of the chain may not sign others")
