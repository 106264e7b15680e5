"""Certificates, keys and kubeconfigs of one cluster."""

from __future__ import annotations

import base64
import datetime as dt
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SERVICE_IP = "10.96.0.1"
_NAMES = (
    "localhost",
    "kubernetes",
    "kubernetes.default",
    "kubernetes.default.svc",
    "kubernetes.default.svc.cluster.local",
)


class Pki:
    """Two certificate authorities (cluster and aggregation layer) and their certificates, as files in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def create(self, address: str) -> None:
        """Create the files for a control plane on `address`."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name in ("ca", "front-ca"):
            self._authority(name)
        self.issue("apiserver", "kube-apiserver", hosts=(*_NAMES, "127.0.0.1", SERVICE_IP, address))
        self.issue("apiserver-kubelet-client", "kube-apiserver-kubelet-client", group="system:masters")
        self.issue("front-proxy-client", "front-proxy-client", authority="front-ca")
        self.issue("admin", "kubernetes-admin", group="system:masters")
        self.issue("kcm", "system:kube-controller-manager")
        self.issue("scheduler", "system:kube-scheduler")
        self.issue("proxy", "system:kube-proxy")
        key = ec.generate_private_key(ec.SECP256R1())
        self._write_key("sa", key)
        (self.folder / "sa.pub").write_bytes(
            key.public_key().public_bytes(
                serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
            )
        )

    def path(self, name: str) -> str:
        """The path of a file: `ca.crt`, `admin.key`, …"""
        return str(self.folder / name)

    def encoded(self, name: str) -> str:
        """A file in base64, as kubeconfigs and webhooks hold it."""
        return base64.b64encode((self.folder / name).read_bytes()).decode()

    def issue(
        self,
        name: str,
        common_name: str,
        *,
        group: str | None = None,
        hosts: Sequence[str] = (),
        authority: str = "ca",
    ) -> None:
        """Create a key and a client certificate, also for a server if hosts are given."""
        key = ec.generate_private_key(ec.SECP256R1())
        attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
        if group:
            attributes.insert(0, x509.NameAttribute(NameOID.ORGANIZATION_NAME, group))
        usages = [ExtendedKeyUsageOID.CLIENT_AUTH] + ([ExtendedKeyUsageOID.SERVER_AUTH] if hosts else [])
        issuer = x509.load_pem_x509_certificate((self.folder / f"{authority}.crt").read_bytes())
        signer = serialization.load_pem_private_key((self.folder / f"{authority}.key").read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        builder = (
            _builder(x509.Name(attributes), issuer.subject, key)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(authority=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
            )
        )
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(h) for h in hosts]), critical=False
            )
        self._write(name, builder.sign(signer, hashes.SHA256()), key)

    def kubeconfig(self, name: str, server: str) -> Path:
        """Write a kubeconfig with embedded credentials."""
        path = self.folder / f"{name}.kubeconfig"
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "shoal-dev",
                    "cluster": {"server": server, "certificate-authority-data": self.encoded("ca.crt")},
                }
            ],
            "users": [
                {
                    "name": name,
                    "user": {
                        "client-certificate-data": self.encoded(f"{name}.crt"),
                        "client-key-data": self.encoded(f"{name}.key"),
                    },
                }
            ],
            "contexts": [{"name": "shoal-dev", "context": {"cluster": "shoal-dev", "user": name}}],
            "current-context": "shoal-dev",
        }
        path.touch(mode=0o600)
        path.write_text(json.dumps(content, indent=1))  # JSON is YAML
        return path

    def _authority(self, name: str) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"shoal-dev {name}")])
        builder = (
            _builder(subject, subject, key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(_usage(authority=True), critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        )
        self._write(name, builder.sign(key, hashes.SHA256()), key)

    def _write(self, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
        (self.folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        self._write_key(name, key)

    def _write_key(self, name: str, key: ec.EllipticCurvePrivateKey) -> None:
        path = self.folder / f"{name}.key"
        path.touch(mode=0o600)
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(hours=1))
        .not_valid_after(now + dt.timedelta(days=365))
    )


def _usage(*, authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=authority,
        crl_sign=authority,
        encipher_only=False,
        decipher_only=False,
    )


def _host(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
