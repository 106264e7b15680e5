"""The job's credentials, and the keys and tokens that are derived from them.

A job has a 32-byte key and a self-signed certificate in a directory: the mounted Secret, or a temporary one for local
runs. The key is never sent: peers prove that they have it (`wire.handshake`), or send a token derived from it over TLS.
It does not change during the job's life. Clients trust only the certificate in the directory.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import ipaddress
import os
import secrets
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from shoal_trainer.errors import UserError

KEY_BYTES = 32


@dataclass(frozen=True)
class Credentials:
    """A job's key with its id, and the directory of its certificate. The repr contains no key."""

    directory: Path
    key_id: str
    key: bytes = field(repr=False)

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Credentials:
        """Read `key` and `key-id`. `UserError` if the key is missing or does not have 32 bytes."""
        root = Path(directory)
        try:
            key, key_id = (root / "key").read_bytes(), (root / "key-id").read_text().strip()
        except FileNotFoundError:
            raise UserError(f"{root} has no key: mount the job's Secret there") from None
        if len(key) != KEY_BYTES:
            raise UserError(f"{root / 'key'} has {len(key)} bytes, expected {KEY_BYTES}")
        return cls(root, key_id, key)

    def token(self, purpose: str) -> str:
        """A bearer token for one purpose, in hex. Send it over TLS only."""
        return derive(self.key, purpose).hex()

    def token_matches(self, purpose: str, token: str) -> bool:
        """Whether `token` is the one for this purpose; compared in constant time."""
        return hmac.compare_digest(self.token(purpose).encode(), token.encode())

    def server_context(self) -> ssl.SSLContext:
        """TLS 1.3 with the job's certificate.

        No client resumes a session. One that is sent a ticket keeps 16 KiB in which it was read (OpenSSL 3.0) for as
        long as the connection lasts, and the operator has a connection to each job.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        context.load_cert_chain(self.directory / "tls.crt", self.directory / "tls.key")
        context.sslsocket_class = _Socket
        return context

    def client_context(self) -> ssl.SSLContext:
        """TLS 1.3 that trusts only the job's certificate; host names are not checked."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(self.directory / "tls.crt")
        context.sslsocket_class = _Socket
        return context

    def certificate_digest(self) -> bytes:
        """The SHA-256 of the certificate (DER), which binds a proof to connections with this certificate."""
        pem = (self.directory / "tls.crt").read_text()
        first = pem[: pem.index("-----END CERTIFICATE-----") + len("-----END CERTIFICATE-----\n")]
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(first.strip() + "\n")).digest()


class _Socket(ssl.SSLSocket):
    """Is closed if its peer has reset the connection before it is wrapped: Python's own (3.11) is dropped open."""

    def recv(self, buflen: int = 1024, flags: int = 0) -> bytes:
        """Receive; before the handshake, this is how `wrap_socket` looks at a connection that is no more."""
        try:
            return super().recv(buflen, flags)
        except OSError:
            if self.version() is None:
                self.close()
            raise


def derive(key: bytes, purpose: str) -> bytes:
    """Derive 32 bytes for one purpose from the job's key (HMAC-SHA256)."""
    return hmac.new(key, f"shoal/v1/{purpose}".encode(), hashlib.sha256).digest()


def key_digest(key_id: str) -> bytes:
    """SHA-256 of a key's id, which has a fixed length for the handshake."""
    return hashlib.sha256(b"shoal/v1/key-id\0" + key_id.encode()).digest()


def create_secret_dir(
    directory: str | os.PathLike[str], *, key: bytes | None = None, key_id: str = "1"
) -> Credentials:
    """Create a key and a self-signed certificate in `directory`, for local runs and tests."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    root = Path(directory)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    private = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shoal-job")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(private.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=3650))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(
            x509.SubjectAlternativeName(
                [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            ),
            critical=False,
        )
        .sign(private, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    unencrypted = serialization.NoEncryption()
    files = {
        "key": key or secrets.token_bytes(KEY_BYTES),
        "key-id": key_id.encode(),
        "tls.crt": certificate.public_bytes(pem),
        "tls.key": private.private_bytes(pem, serialization.PrivateFormat.PKCS8, unencrypted),
    }
    for file, content in files.items():
        path = root / file
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as handle:
            handle.write(content)
    return Credentials.load(root)
