"""Finds a prebuilt llama.cpp on this machine, and refuses one that it does not know.

No compiler is used. Struct layouts change between releases, so every release that may be loaded stands in
`KNOWN`, and the defaults that the library itself reports are compared with what the layout predicts.
"""

from __future__ import annotations

import ctypes as c
import importlib.metadata
import importlib.util
import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from meshnet.engine.base import EngineError
from meshnet.engine.bindings import ContextParams, ContextParamsShort, LogCallback, ModelParams, bind

log = logging.getLogger("meshnet.llama")

MODEL_DEFAULTS: Mapping[str, int | None] = {
    "devices": None,
    "tensor_buft_overrides": None,
    "n_gpu_layers": -1,
    "split_mode": 1,
    "load_mode": -1,
    "lazy_mode": 1,
    "main_gpu": 0,
    "tensor_split": None,
    "progress_callback": None,
    "progress_user_data": None,
    "kv_overrides": None,
    "vocab_only": 0,
    "check_tensors": 0,
    "use_extra_bufts": 1,
    "no_host": 0,
    "no_alloc": 0,
    "load_mtp": 0,
}
CONTEXT_DEFAULTS: Mapping[str, int | None] = {
    "n_ctx": 512,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_seq_max": 1,
    "n_rs_seq": 0,
    "n_outputs_max": 0,
    "n_outputs_max_per_seq": 1,
    "n_threads": 4,
    "n_threads_batch": 4,
    "ctx_type": 0,
    "rope_scaling_type": -1,
    "pooling_type": -1,
    "attention_type": -1,
    "flash_attn_type": -1,
    "yarn_orig_ctx": 0,
    "defrag_thold": -1,
    "cb_eval": None,
    "cb_eval_user_data": None,
    "type_k": 1,
    "type_v": 1,
    "abort_callback": None,
    "abort_callback_data": None,
    "reserved": None,
    "embeddings": 0,
    "offload_kqv": 1,
    "no_perf": 1,
    "op_offload": 1,
    "swa_full": 1,
    "kv_unified": 0,
    "samplers": None,
    "n_samplers": 0,
    "ctx_other": None,
}


@dataclass(frozen=True)
class Known:
    """One release that may be loaded: where its library lies, and what its defaults must read as."""

    provider: str
    version: str
    files: tuple[str, ...]
    """Patterns below site-packages, tried in order."""
    context: type[c.Structure] = ContextParams


# The second is compiled on the user's machine, where the first one's wheel does not export the C API and for
# GPU builds. Its layout was read from the headers that its source package holds; it was never run.
KNOWN: tuple[Known, ...] = (
    Known("xllamacpp", "2026.10.11549", ("xllamacpp/xllamacpp*.so", "xllamacpp/xllamacpp*.pyd")),
    Known(
        "llama-cpp-python",
        "0.3.36",
        ("llama_cpp/lib/libllama.so", "llama_cpp/lib/libllama.dylib", "llama_cpp/lib/llama.dll"),
        ContextParamsShort,
    ),
)

# libgomp reads these once, when it is loaded. How long an idle thread spins before it sleeps: long enough for
# the barriers inside a step, short enough that a node that waits leaves its cores to its neighbour (some 50
# microseconds). Two nodes of two threads on two cores, SmolLM2: 18.4 ms per token with 0, 8.4 from 500 on.
SPIN_COUNT = "2000"


@dataclass(frozen=True)
class Library:
    """A loaded llama.cpp with all prototypes set."""

    api: c.CDLL
    provider: str
    version: str
    path: Path


def refusal(found: Mapping[str, str | None], missing: list[str]) -> str:
    """Why nothing could be loaded, from the versions found per provider; one sentence."""
    wanted = " or ".join(f"{known.provider} {known.version}" for known in KNOWN)
    have = ", ".join(f"{name} {version}" for name, version in found.items() if version) or "neither"
    if missing:
        return f"llama.cpp of {have} does not export {missing[0]}; install {wanted}"
    return f"the llama.cpp engine needs {wanted}, found {have}: its struct layout is not known; install that"


def layout_difference(struct: c.Structure, expected: Mapping[str, int | None]) -> str | None:
    """The first field whose value is not as expected, as a phrase, or None."""
    for name, value in expected.items():
        actual = getattr(struct, name)
        if actual != value:
            return f"{type(struct).__name__}.{name} reads {actual!r} where {value!r} was expected"
    return None


def installed_version(provider: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return importlib.metadata.version(provider)
    except importlib.metadata.PackageNotFoundError:
        return None


def _locate(known: Known) -> Path | None:
    package = known.files[0].split("/", 1)[0]
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent.parent
    for pattern in known.files:
        for path in sorted(root.glob(pattern)):
            return path
    return None


def set_thread_policy(environment: Callable[[str, str], Any] = os.environ.setdefault) -> None:
    """Thread settings that the OpenMP runtime reads when it loads; what the user set stays."""
    environment("OMP_WAIT_POLICY", "passive")
    environment("GOMP_SPINCOUNT", SPIN_COUNT)


class _State:
    """The process's one llama.cpp, and what it says."""

    lock: ClassVar = threading.Lock()
    library: ClassVar[Library | None] = None
    callback: ClassVar[Any] = None
    recent: ClassVar[deque[str]] = deque(maxlen=20)
    listener: ClassVar[Callable[[str], None] | None] = None


def _on_log(level: int, text: bytes, _user: int) -> None:
    line = text.decode("utf-8", "replace").strip()
    if _State.listener is not None:
        _State.listener(line)
    if line and level in (3, 4):
        _State.recent.append(line)
        log.log(logging.ERROR if level == 4 else logging.DEBUG, "%s", line)


@contextmanager
def listen(listener: Callable[[str], None]) -> Iterator[None]:
    """Hand every line that llama.cpp says meanwhile to `listener`: buffer sizes are told in no other way."""
    _State.listener = listener
    try:
        yield
    finally:
        _State.listener = None


def last_messages(count: int = 3) -> str:
    """What llama.cpp last complained about, for error messages; empty if it did not."""
    return "; ".join(list(_State.recent)[-count:])


def forget_messages() -> None:
    """Before a call whose complaints are wanted."""
    _State.recent.clear()


def load_library() -> Library:
    """The process's llama.cpp, loaded and checked on the first call. Raises EngineError."""
    with _State.lock:
        if _State.library is None:
            _State.library = _load()
        return _State.library


def _load() -> Library:
    found = {known.provider: installed_version(known.provider) for known in KNOWN}
    problems = []
    for known in KNOWN:
        if found[known.provider] != known.version:
            continue
        path = _locate(known)
        if path is None:
            problems.append(f"{known.provider} {known.version} holds no library for {sys.platform}")
            continue
        try:
            return _open(known, path)
        except EngineError as error:
            problems.append(str(error))
    raise EngineError("; ".join(problems) or refusal(found, []))


def _open(known: Known, path: Path) -> Library:
    set_thread_policy()
    try:
        api = c.CDLL(str(path))
    except OSError as error:
        raise EngineError(f"{path} cannot be loaded: {error}") from error
    if missing := bind(api, known.context):
        raise EngineError(refusal({known.provider: known.version}, missing))
    check_layout(known, api.llama_model_default_params(), api.llama_context_default_params())
    _State.callback = LogCallback(_on_log)
    api.llama_log_set(c.cast(_State.callback, c.c_void_p), None)
    api.llama_backend_init()
    return Library(api, known.provider, known.version, path)


def check_layout(known: Known, model: ModelParams, context: c.Structure) -> None:
    """Raises EngineError where the defaults read through our layouts are not the known ones."""
    names = {each[0] for each in known.context._fields_}
    defaults = {name: value for name, value in CONTEXT_DEFAULTS.items() if name in names}
    difference = layout_difference(model, MODEL_DEFAULTS) or layout_difference(context, defaults)
    if difference:
        raise EngineError(
            f"{known.provider} {known.version} does not have the struct layout known for it ({difference}); "
            "reinstall exactly this version"
        )
