"""Keys that sign certificates: an Ed25519 key in a file, or an ECDSA key on P-256 in Cloud KMS."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import ECDSA, SECP256R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from outbox.base.lazy import need
from outbox.errors import NotReached, SettingError

ALGORITHM = "EC_SIGN_P256_SHA256"


@dataclass(frozen=True)
class PublicKey:
    """A key that verifies signatures. Its ID is the SHA-256 of its DER form."""

    key: Ed25519PublicKey | EllipticCurvePublicKey

    @property
    def id(self) -> str:
        """Return what a certificate names the key."""
        form = serialization.PublicFormat.SubjectPublicKeyInfo
        return hashlib.sha256(self.key.public_bytes(serialization.Encoding.DER, form)).hexdigest()

    def verifies(self, signature: bytes, data: bytes) -> bool:
        """Tell whether a signature is of these bytes."""
        try:
            if isinstance(self.key, Ed25519PublicKey):
                self.key.verify(signature, data)
            else:
                self.key.verify(signature, data, ECDSA(hashes.SHA256()))
        except InvalidSignature:
            return False
        return True


@dataclass(frozen=True)
class Signer:
    """A key that signs bytes."""

    public: PublicKey
    sign: Callable[[bytes], bytes]


def public_key(pem: bytes, where: str) -> PublicKey:
    """Return a public key. Raises SettingError."""
    try:
        key = serialization.load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingError(f"{where} is not a public key in PEM form: {error}") from None
    if isinstance(key, Ed25519PublicKey) or (
        isinstance(key, EllipticCurvePublicKey) and isinstance(key.curve, SECP256R1)
    ):
        return PublicKey(key)
    raise SettingError(f"{where} is neither an Ed25519 key nor an ECDSA key on P-256")


def file_signer(path: str) -> Signer:
    """Return the signer with the private key in a file. Raises SettingError."""
    try:
        key = serialization.load_pem_private_key(contents(path), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingError(f"{path} is not a private key in PEM form without a password: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingError(f"{path} is not an Ed25519 key. Create one: openssl genpkey -algorithm ed25519 -out {path}")
    return Signer(PublicKey(key.public_key()), key.sign)


def kms_signer(name: str, client: Any = None) -> Signer:
    """Return the signer with a key version in Cloud KMS. Raises SettingError, OutboxError, NotReached."""
    need("google.cloud.kms", "--kms-key", "kms")
    from google.api_core.exceptions import GoogleAPIError  # noqa: PLC0415 - with the package of the extra
    from google.auth.exceptions import GoogleAuthError  # noqa: PLC0415 - the same
    from google.cloud import kms  # noqa: PLC0415 - the same

    def asked(method: str, **request: Any) -> Any:
        try:
            return getattr(service, method)(request={"name": name, **request}, timeout=60)
        except GoogleAPIError as error:
            raise NotReached(f"Cloud KMS refused {method} of {name}: {error}") from error

    def sign(data: bytes) -> bytes:
        # The signature only matches if neither the request nor the answer was damaged, so it needs no CRC32C.
        signature: bytes = asked("asymmetric_sign", digest={"sha256": hashlib.sha256(data).digest()}).signature
        if not public.verifies(signature, data):
            raise NotReached(f"Cloud KMS returned a signature that is not of {name}. Run the audit again")
        return signature

    try:
        service = client or kms.KeyManagementServiceClient()
    except GoogleAuthError as error:
        raise NotReached(f"Cloud KMS cannot be used: {error}") from error
    found = asked("get_public_key")
    if found.algorithm.name != ALGORITHM:
        raise SettingError(f"--kms-key {name} has the algorithm {found.algorithm.name}. Pass a key with {ALGORITHM}")
    public = public_key(found.pem.encode(), name)
    return Signer(public, sign)


def contents(path: str | Path) -> bytes:
    """Return the contents of a local file. Raises SettingError."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from None
