"""The replica's TLS: a key that never leaves its folder, and a certificate that gateways know by its fingerprint."""

from __future__ import annotations

import hashlib
import os
import ssl
from pathlib import Path


def make_context(folder: Path, name: str) -> tuple[ssl.SSLContext, str]:
    """The server's side, and the certificate's SHA-256 in hexadecimal. The folder is this user's alone."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name[:64])])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=400))
        .sign(key, hashes.SHA256())
    )
    coding = serialization.Encoding
    pem = key.private_bytes(coding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    pem += certificate.public_bytes(coding.PEM)
    path = folder / "tls.pem"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(path)
    finally:
        path.unlink()
    return context, hashlib.sha256(certificate.public_bytes(coding.DER)).hexdigest()
