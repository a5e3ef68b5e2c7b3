"""Loading llama.cpp: what is known is loaded, and anything else is refused in one sentence."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

import meshnet.engine.library as library_module
from meshnet.engine.base import EngineError
from meshnet.engine.bindings import FUNCTIONS, bind
from meshnet.engine.library import (
    CONTEXT_DEFAULTS,
    KNOWN,
    MODEL_DEFAULTS,
    Known,
    check_layout,
    installed_version,
    layout_difference,
    load_library,
    refusal,
    set_thread_policy,
)


def test_the_pinned_version_is_loaded_once() -> None:
    library = load_library()
    assert library is load_library()
    assert (library.provider, library.version) in {(known.provider, known.version) for known in KNOWN}
    assert library.version == installed_version(library.provider)
    assert library.path.is_file()


@pytest.mark.parametrize(
    "name", ["n_ctx", "flash_attn_type", "type_v", "kv_unified", "cb_eval", "n_samplers"]
)
def test_a_context_layout_that_moved_is_refused(name: str) -> None:
    api = load_library().api
    context = api.llama_context_default_params()
    setattr(context, name, 77)
    with pytest.raises(EngineError, match=rf"ContextParams\.{name} reads .* was expected"):
        check_layout(KNOWN[0], api.llama_model_default_params(), context)


@pytest.mark.parametrize("name", ["n_gpu_layers", "split_mode", "check_tensors", "kv_overrides"])
def test_a_model_layout_that_moved_is_refused(name: str) -> None:
    api = load_library().api
    model = api.llama_model_default_params()
    setattr(model, name, 77)
    with pytest.raises(EngineError, match=rf"ModelParams\.{name} reads"):
        check_layout(KNOWN[0], model, api.llama_context_default_params())


def test_the_other_layout_lacks_one_pointer() -> None:
    whole, short = KNOWN[0].context, KNOWN[1].context
    assert ctypes.sizeof(whole) == 168
    assert ctypes.sizeof(short) == 160
    names = [each[0] for each in short._fields_]
    assert names == [each[0] for each in whole._fields_ if each[0] != "reserved"]
    api = load_library().api
    wrong = short.from_buffer_copy(api.llama_context_default_params())  # this library has the other one
    with pytest.raises(EngineError, match="ContextParamsShort"):
        check_layout(KNOWN[1], api.llama_model_default_params(), wrong)


def test_every_field_is_checked() -> None:
    api = load_library().api
    for struct, expected in (
        (api.llama_model_default_params(), MODEL_DEFAULTS),
        (api.llama_context_default_params(), CONTEXT_DEFAULTS),
    ):
        names = {field[0] for field in struct._fields_} - {"rope_and_yarn"}
        assert names == set(expected)
        assert layout_difference(struct, expected) is None


def test_an_unknown_version_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "KNOWN", (Known("xllamacpp", "1999.1.1", ("xllamacpp/*.so",)),))
    with pytest.raises(EngineError) as caught:
        library_module._load()
    message = str(caught.value)
    assert "needs xllamacpp 1999.1.1" in message
    assert f"found xllamacpp {installed_version('xllamacpp')}" in message
    assert "\n" not in message


def test_a_missing_provider_is_refused() -> None:
    assert "found neither" in refusal({"xllamacpp": None, "llama-cpp-python": None}, [])


def test_a_library_without_the_c_api_is_refused() -> None:
    missing = bind(ctypes.CDLL(None))
    assert set(missing) == set(FUNCTIONS)
    assert "does not export llama_backend_init" in refusal({"xllamacpp": "1"}, missing)


def test_thread_settings_of_the_user_stay() -> None:
    found: dict[str, str] = {"OMP_WAIT_POLICY": "active"}
    set_thread_policy(found.setdefault)
    assert found["OMP_WAIT_POLICY"] == "active"
    assert int(found["GOMP_SPINCOUNT"]) >= 0


def test_importing_the_engine_loads_nothing() -> None:
    code = (
        "import sys, meshnet.engine.llama, meshnet.engine.tokenizer\n"
        "maps = open('/proc/self/maps').read() if sys.platform == 'linux' else ''\n"
        "assert 'xllamacpp' not in maps and 'libgomp' not in maps\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=60)
