"""Gives nodes their certificates: the tracker's side of protocol/enrolment.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
import structlog

from meshnet.protocol.enrolment import EnrolAnswer, EnrolRequest, key_id, proof_key
from meshnet.protocol.errors import ApiError
from meshnet.protocol.keys import CertificateError, id_of
from meshnet.tracker.books.facade import Books
from meshnet.tracker.credential import make_credential
from meshnet.tracker.tries import FailedTries

if TYPE_CHECKING:
    from meshnet.tracker.authority import Authority

log = structlog.get_logger("meshnet.enrol")

_decode = msgspec.json.Decoder(EnrolRequest).decode


class Registrar:
    """Decides who gets a certificate. By token: new nodes, whose id follows from their key. By credential:
    nodes that were here, under the id that the credential is for."""

    def __init__(self, authority: Authority, books: Books, tries: FailedTries) -> None:
        self.authority = authority
        self._books = books
        self._tries = tries

    async def enrol(self, body: bytes, address: str) -> EnrolAnswer:
        """Raises ApiError, and BooksError where a token no longer holds."""
        wait = self._tries.wait_s(address)
        if wait:
            raise ApiError(
                429,
                f"too many failed joins from this address; wait {wait} s",
                code="too_many_tries",
                retry_after=wait,
            )
        try:
            asked = _decode(body)
        except msgspec.DecodeError as error:
            raise ApiError(400, f"the request cannot be read: {error}", code="invalid_json") from error
        if not 1 <= len(asked.node_id) <= 128 or not asked.node_id.isprintable():
            raise ApiError(400, "node_id must have 1 to 128 printable characters", code="bad_request")
        key = await self._key(asked)
        if key is None or not asked.proves(key):
            self._tries.failed(address)
            what = "join token" if asked.by == "token" else "node's credential"
            raise ApiError(
                403,
                f"the {what} is not one of mesh {self._books.mesh.id}; get a new one with `meshnet invite`",
                code="bad_token",
            )
        try:
            certificate, public_key = self.authority.issue(asked.node_id, asked.csr)
        except CertificateError as error:
            raise ApiError(400, str(error), code="bad_request") from error
        if asked.by == "token":
            if asked.node_id != id_of(public_key):
                raise ApiError(
                    403,
                    f"the id {asked.node_id} does not belong to this node's key; a join token lets in nodes "
                    "under an id of their own only: give the node a new data folder (--data)",
                    code="wrong_id",
                )
            await self._books.joins.admit_proven(key, asked.node_id)
        log.info("certificate given", node_id=asked.node_id, by=asked.by)
        return EnrolAnswer(certificate, self.authority.ca).sealed(key, asked.nonce)

    async def _key(self, asked: EnrolRequest) -> str | None:
        mesh = self._books.mesh
        if asked.by == "credential":
            return proof_key(make_credential(mesh.signing_secret, mesh.id, asked.node_id), mesh.id)
        return await self._books.joins.find_hash(lambda key: key_id(key) == asked.key_id)
