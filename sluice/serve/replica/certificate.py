"""The replica's TLS: a key that never leaves its memory, and a certificate that gateways know by its fingerprint."""

from __future__ import annotations

import hashlib
import os
import ssl


def make_context(name: str) -> tuple[ssl.SSLContext, str]:
    """The server's side, and the certificate's SHA-256 in hexadecimal."""
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
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    with os.fdopen(os.memfd_create("tls.pem"), "wb", buffering=0) as file:  # Python's ssl takes files alone
        file.write(pem)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}")
    return context, hashlib.sha256(certificate.public_bytes(coding.DER)).hexdigest()
