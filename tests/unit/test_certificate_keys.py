"""Certificates signed with a key in Cloud KMS, by the real client with a server of its interface, and other keys."""

import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa, utils
from google.cloud import kms
from google.cloud.kms_v1.services.key_management_service.transports import KeyManagementServiceGrpcTransport

from outbox.errors import NotReached, SettingError
from outbox_pipeline.jobs.certificate import document, keys
from tests.support.certificates import new_key
from tests.support.rpc import Served

NAME = "projects/p/locations/l/keyRings/r/cryptoKeys/k/cryptoKeyVersions/1"
PRIVATE = ec.generate_private_key(ec.SECP256R1())


def pem(key: Any) -> bytes:
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return bytes(key.public_key().public_bytes(serialization.Encoding.PEM, form))


class Kms(Served):
    """Answers as Cloud KMS does."""

    algorithm = "EC_SIGN_P256_SHA256"
    signs_with = PRIVATE
    #: What is lost at the end of the digest on its way, and replaced by zeros.
    damaged = 0
    status: grpc.StatusCode | None = None

    def forward(self, method: str, request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        if self.status:
            context.abort(self.status, "no permission")
        if method.endswith("/GetPublicKey"):
            key = kms.PublicKey(name=NAME, pem=pem(PRIVATE).decode(), algorithm=self.algorithm)
            yield kms.PublicKey.serialize(key)
        else:
            sent = kms.AsymmetricSignRequest.deserialize(request).digest.sha256
            came = sent[: 32 - self.damaged] + bytes(self.damaged)
            signature = self.signs_with.sign(came, ec.ECDSA(utils.Prehashed(hashes.SHA256())))
            yield kms.AsymmetricSignResponse.serialize(kms.AsymmetricSignResponse(signature=signature))


@pytest.fixture
def service() -> Iterator[tuple[Kms, kms.KeyManagementServiceClient]]:
    with Kms() as server, grpc.insecure_channel(server.address) as channel:
        yield server, kms.KeyManagementServiceClient(transport=KeyManagementServiceGrpcTransport(channel=channel))


def test_cloud_kms_signs_what_openssl_verifies(service: tuple[Kms, Any], tmp_path: Path):
    _, client = service
    signer = keys.kms_signer(NAME, client)
    signed = document.encoded(b"{}")
    (tmp_path / "signed").write_bytes(signed)
    (tmp_path / "signature").write_bytes(signer.sign(signed))
    (tmp_path / "key.pub").write_bytes(pem(PRIVATE))
    command = ["openssl", "dgst", "-sha256", "-verify", "key.pub", "-signature", "signature", "signed"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=True).stdout == b"Verified OK\n"
    der = subprocess.run(
        ["openssl", "pkey", "-pubin", "-in", "key.pub", "-outform", "DER"],
        cwd=tmp_path,
        capture_output=True,
        check=True,
    ).stdout
    assert signer.public.id == hashlib.sha256(der).hexdigest()


def test_a_key_of_cloud_kms_that_cannot_sign_is_refused(service: tuple[Kms, Any]):
    answers, client = service
    answers.damaged = 1  # which CRC32C would notice, too
    with pytest.raises(NotReached, match=f"returned a signature that is not of {NAME}"):
        keys.kms_signer(NAME, client).sign(b"")
    answers.damaged = 0
    answers.signs_with = ec.generate_private_key(ec.SECP256R1())
    with pytest.raises(NotReached, match="returned a signature that is not of"):
        keys.kms_signer(NAME, client).sign(b"")
    answers.algorithm = "EC_SIGN_P384_SHA384"
    with pytest.raises(SettingError, match=r"has the algorithm EC_SIGN_P384_SHA384\. Pass a key with EC_SIGN_P256"):
        keys.kms_signer(NAME, client)
    answers.status = grpc.StatusCode.PERMISSION_DENIED
    with pytest.raises(NotReached, match=r"Cloud KMS refused get_public_key of .*: 403 no permission"):
        keys.kms_signer(NAME, client)


def test_other_keys_are_refused(tmp_path: Path):
    new_key(tmp_path)
    other = rsa.generate_private_key(65537, 2048)
    with pytest.raises(SettingError, match="neither an Ed25519 key nor an ECDSA key on P-256"):
        keys.public_key(pem(other), "other.pub")
    with pytest.raises(SettingError, match="is not a private key in PEM form"):
        keys.file_signer(str(tmp_path / "key.pub"))
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (tmp_path / "rsa.pem").write_bytes(other.private_bytes(*form))
    with pytest.raises(SettingError, match=r"is not an Ed25519 key\. Create one: openssl genpkey"):
        keys.file_signer(str(tmp_path / "rsa.pem"))
    with pytest.raises(SettingError, match="none cannot be read: No such file"):
        keys.file_signer("none")
