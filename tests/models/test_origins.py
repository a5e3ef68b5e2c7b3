"""Several machines that hold parts of a model, and what they serve over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from support.random_gguf import write_random_model

from meshnet.models.errors import FetchFailed, HashMismatch, ModelError
from meshnet.models.fingerprint import fingerprint, with_fingerprint
from meshnet.models.gguf import ModelFile
from meshnet.models.origins import Origin, Origins, spans_of
from meshnet.models.remote import ByteSource, SourceCut, fetch_slice
from meshnet.models.serving import Shelved, read_bounded, read_spans, weight_routes
from meshnet.models.slice import SlicePlan, plan_slice, write_slice
from meshnet.models.sources import LocalSource, SliceSource
from meshnet.protocol.passes import WeightsPass, sign_pass, verify_pass
from meshnet.protocol.tickets import Ticket, TicketError, sign_ticket, verify_ticket

RandomModel = Callable[..., Path]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelFile:
    """In three parts, as large models come."""
    path = write_random_model(
        tmp_path_factory.mktemp("split") / "m.gguf", "llama", n_layers=8, quant="q8_0", split_tensors=30
    )
    found = ModelFile.open(path)
    assert len(found.files) > 1
    return with_fingerprint(found, fingerprint(found))


@pytest.fixture(scope="module")
def distant(model: ModelFile) -> ModelFile:
    return ModelFile.from_manifest(model.to_manifest())


def held(model: ModelFile, first: int, last: int, folder: Path) -> Origin:
    plan = plan_slice(model, first, last)
    path = write_slice(plan, folder / f"{first}-{last}.gguf")
    return Origin(f"{first}-{last}", SliceSource(plan, path), spans_of(plan.pieces))


class Faulty:
    """Sends the first byte wrong, or breaks off after some bytes."""

    def __init__(self, inner: ByteSource, *, cut_after: int | None = None) -> None:
        self.inner, self.cut_after = inner, cut_after
        self.asked = 0

    async def read(self, file_index: int, offset: int, length: int) -> AsyncIterator[bytes]:
        self.asked += 1
        async for chunk in self.inner.read(file_index, offset, length):
            if self.cut_after is None:
                yield bytes([chunk[0] ^ 1]) + chunk[1:]
                continue
            yield chunk[: self.cut_after]
            raise SourceCut("cable pulled")


def expected(model: ModelFile, plan: SlicePlan, folder: Path) -> bytes:
    return write_slice(plan_slice(model, plan.first, plan.last), folder / "expected.gguf").read_bytes()


async def test_two_halves_make_a_whole(model: ModelFile, distant: ModelFile, tmp_path: Path) -> None:
    origins = Origins([held(model, 0, 3, tmp_path), held(model, 4, 7, tmp_path)])
    plan = plan_slice(distant, 0, 7)
    assert not origins.missing(plan)
    out = await fetch_slice(plan, origins, tmp_path / "whole.gguf")
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert Origins([held(model, 0, 3, tmp_path)]).missing(plan)
    with pytest.raises(FetchFailed, match="no machine of the mesh has byte"):
        await fetch_slice(plan, Origins([held(model, 0, 3, tmp_path)]), tmp_path / "half.gguf")


async def test_a_wrong_byte_is_refused_and_its_sender_left(
    model: ModelFile, distant: ModelFile, tmp_path: Path
) -> None:
    plan = plan_slice(distant, 2, 4)
    bad = Faulty(LocalSource(model))
    only = Origins([Origin("bad", bad)])
    with pytest.raises(HashMismatch, match="wrong hash"):
        await fetch_slice(plan, only, tmp_path / "no.gguf", blame=only.blame)
    bad.asked = 0
    both = Origins([Origin("bad", bad), Origin("good", LocalSource(model))])
    out = await fetch_slice(plan, both, tmp_path / "yes.gguf", blame=both.blame)
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert [origin.name for origin in both.origins] == ["good"]
    assert bad.asked == 1


async def test_the_next_one_goes_on_where_one_breaks_off(
    model: ModelFile, distant: ModelFile, tmp_path: Path
) -> None:
    plan = plan_slice(distant, 0, 2)
    told: list[str] = []
    weak = Faulty(LocalSource(model), cut_after=1000)
    origins = Origins([Origin("weak", weak), Origin("strong", LocalSource(model))], told.append)
    out = await fetch_slice(plan, origins, tmp_path / "out.gguf")
    assert out.read_bytes() == expected(model, plan, tmp_path)
    assert told == ["weak", "strong"]
    assert weak.asked == 1


async def call(app: Starlette, path: str, headers: dict[str, str] | None = None) -> tuple[int, bytes]:
    """One GET of an application in this process."""
    status, body = 0, b""

    async def receive() -> dict[str, object]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, object]) -> None:
        nonlocal status, body
        if message["type"] == "http.response.start":
            status = int(str(message["status"]))
        else:
            body += bytes(message.get("body", b""))  # type: ignore[call-overload]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "method": "GET",
        "path": path,
        "query_string": b"",
        "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
    }
    await app(scope, receive, send)  # type: ignore[arg-type]
    return status, body


async def test_weights_are_served_by_range_to_those_who_may(model: ModelFile, tmp_path: Path) -> None:
    part = held(model, 2, 3, tmp_path)
    shelved = {model.fingerprint: Shelved(model, [part])}

    def refuse(request: Request, wanted: str) -> Response | None:
        return None if request.headers.get("pass") == wanted else Response("no", 401)

    app = Starlette(routes=weight_routes(shelved.get, refuse))
    base, entry = f"/weights/{model.fingerprint}", {"pass": model.fingerprint}
    assert (await call(app, base))[0] == 401
    assert (await call(app, "/weights/other", {"pass": "other"}))[0] == 404
    status, manifest = await call(app, base, entry)
    assert status == 200
    assert ModelFile.from_manifest(manifest).fingerprint == model.fingerprint
    status, spans = await call(app, f"{base}/held", entry)
    assert part.spans == read_spans(spans)
    index, first, end = part.spans[0] if part.spans else (0, 0, 0)
    for wanted, answer in (
        (f"bytes={first}-{end - 1}", 206),
        (f"bytes={first}-{end}", 416),
        (f"bytes={end - 1}-{first}", 416),
        (f"bytes={first}-", 416),
        ("", 416),
    ):
        status, body = await call(app, f"{base}/files/{index}", {**entry, "range": wanted})
        assert status == answer, wanted
    status, body = await call(app, f"{base}/files/{index}", {**entry, "range": f"bytes={first}-{end - 1}"})
    path = model.files[index].path
    assert path is not None
    assert body == path.read_bytes()[first:end]
    assert (await call(app, f"{base}/files/99", {**entry, "range": "bytes=0-1"}))[0] == 404


async def test_what_others_say_of_themselves_is_bounded() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(4):
            yield b"x" * 10

    assert len(await read_bounded(chunks(), 40)) == 40
    with pytest.raises(ModelError, match="more than 39 bytes"):
        await read_bounded(chunks(), 39)
    for nonsense in (
        b"",
        b"[]",
        b'{"spans": [[1, 2]]}',
        b'{"spans": 3}',
        b'{"spans": [["a", 1, 2]]}',
    ):
        with pytest.raises(ModelError):
            read_spans(nonsense)


def test_a_pass_is_good_for_its_weights_alone() -> None:
    key = Ed25519PrivateKey.generate()
    text = sign_pass(WeightsPass("mesh", "print", "node", 1000), key)
    public = key.public_key()
    assert verify_pass(text, public, mesh_id="mesh", fingerprint="print", now_ms=999).node_id == "node"
    ticket = sign_ticket(Ticket("mesh", "call", 0, "m", "print", (), 1000), key)
    stranger = Ed25519PrivateKey.generate().public_key()
    for given, with_key, mesh_id, wanted, now_ms in (
        (text, public, "other", "print", 0),
        (text, public, "mesh", "other", 0),
        (text, public, "mesh", "print", 1000),
        (text, stranger, "mesh", "print", 0),
        (ticket, public, "mesh", "print", 0),
        ("", public, "mesh", "print", 0),
    ):
        with pytest.raises(TicketError):
            verify_pass(given, with_key, mesh_id=mesh_id, fingerprint=wanted, now_ms=now_ms)
    with pytest.raises(TicketError):
        verify_ticket(text, public, mesh_id="mesh", now_ms=0)
