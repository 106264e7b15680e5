"""Derives a job's key and certificate on demand, so that the operator never has to read a Secret.

A run keeps the key that its Secret was made with. While an install key is rotated there are two from which that may
have been, and nothing says which: the operator makes Secrets with the newer one, and knows a coordinator by either.

Both are derived from the install key and the job's uid. The certificate is self-signed with Ed25519, whose signatures
are deterministic (RFC 8032), and has fixed dates: every replica derives the same bytes, also after a restart, and can
pin the certificate.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.x509.oid import NameOID

from shoal_trainer.contract import job_key, status_token

FIRST_KEY_ID = "1"

_FROM, _UNTIL = datetime(2020, 1, 1, tzinfo=UTC), datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)


@dataclass(frozen=True)
class InstallKey:
    """The secret from which every job's key is derived, and its id. `previous`: the one before, while it is rotated."""

    secret: bytes = field(repr=False)
    id: str = FIRST_KEY_ID
    previous: InstallKey | None = None


@dataclass(frozen=True)
class JobCredentials:
    """The content of a job's Secret. Its repr shows no secret."""

    key: bytes = field(repr=False)
    key_id: str
    certificate: str
    private_key: str = field(repr=False)
    previous: JobCredentials | None = field(default=None, repr=False)
    """Those that the run has if its Secret was made before the install key was rotated."""

    @property
    def token(self) -> str:
        """The bearer token for the status endpoint."""
        return status_token(self.key)

    def secret_data(self) -> dict[str, bytes]:
        """The files of the Secret, as `shoal_trainer.contract.SECRET_DIR` lists them."""
        return {
            "key": self.key,
            "key-id": self.key_id.encode(),
            "tls.crt": self.certificate.encode(),
            "tls.key": self.private_key.encode(),
        }


class CredentialsOfJobs:
    """The credentials of all runs, each derived once: a plan must not wait for a signature."""

    def __init__(self, install_key: InstallKey) -> None:
        self._install_key = install_key
        self._of: dict[str, JobCredentials] = {}

    def get(self, job_uid: str) -> JobCredentials:
        """The credentials of one run."""
        if (known := self._of.get(job_uid)) is None:
            known = self._of[job_uid] = job_credentials(self._install_key, job_uid)
        return known

    def forget(self, job_uid: str) -> None:
        """Drop those of a run that is gone."""
        self._of.pop(job_uid, None)


def job_credentials(install_key: InstallKey, job_uid: str) -> JobCredentials:
    """The credentials of one run."""
    key = job_key(install_key.secret, job_uid, install_key.id)
    private = Ed25519PrivateKey.from_private_bytes(_derive(key, b"tls-key"))
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"shoal-job-{job_uid}")])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(int.from_bytes(_derive(key, b"tls-serial")[:16]) >> 1 or 1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("shoal-job")]), critical=False)
        .sign(private, None)
    )
    pem = serialization.Encoding.PEM
    return JobCredentials(
        key=key,
        key_id=install_key.id,
        previous=job_credentials(install_key.previous, job_uid) if install_key.previous else None,
        certificate=certificate.public_bytes(pem).decode(),
        private_key=private.private_bytes(
            pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ).decode(),
    )


def _derive(key: bytes, purpose: bytes) -> bytes:
    return hmac.new(key, b"shoal/v1/" + purpose, hashlib.sha256).digest()
