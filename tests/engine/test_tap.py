"""The callback that takes a layer's result out: its machine code, and the same logic in Python."""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import pytest

import meshnet.engine.tap as tap_module
from meshnet.engine.base import EngineError, Step
from meshnet.engine.library import load_library
from meshnet.engine.llama import LlamaEngine
from meshnet.engine.tap import CODE_X86_64, Tap, native_code
from meshnet.models.gguf import ModelFile
from meshnet.models.store import Store

SOURCE = Path(tap_module.__file__).with_name("tap.ll")


def test_the_machine_code_is_what_its_source_compiles_to() -> None:
    llvm = pytest.importorskip("llvmlite.binding", reason="llvmlite is a development dependency")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = "x86_64-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu="x86-64", opt=2, reloc="pic", codemodel="small"
    )
    module = llvm.parse_assembly(SOURCE.read_text())
    module.triple = triple
    module.verify()
    sections = llvm.ObjectFileRef.from_data(machine.emit_object(module)).sections()
    text = [section.data() for section in sections if section.name() in (b".text", ".text")]
    assert text == [CODE_X86_64]


def test_the_native_callback_is_used_on_linux_x86_64() -> None:
    expected = platform.system() == "Linux" and platform.machine() == "x86_64"
    assert (native_code() is not None) == expected


@pytest.mark.skipif(native_code() is None, reason="no machine code for this platform")
def test_both_callbacks_give_the_same_rows(smollm2: ModelFile, store: Store) -> None:
    tokens = np.arange(100, 140, dtype=np.int32)
    found = []
    for native in (True, False):
        engine = LlamaEngine.load(
            smollm2, 0, 3, n_slots=2, n_ctx=256, threads=1, native_tap=native, store=store
        )
        assert engine.describe()["tap"] == ("native" if native else "python")
        rows = []
        for end in (3, 1):
            engine.open(0, 0, end)
            rows.append(engine.run([Step(0, 0, tokens=tokens)])[0].hidden)
            rows.append(engine.run([Step(0, 40, tokens=tokens[:1])])[0].hidden)
        found.append(rows)
        engine.unload()
    for native_rows, python_rows in zip(*found, strict=True):
        assert native_rows is not None
        assert python_rows is not None
        assert native_rows.shape[1] == 576
        assert np.array_equal(native_rows, python_rows)


@pytest.mark.parametrize("native", [True, False])
def test_a_tensor_that_never_came_is_an_error(native: bool) -> None:
    found = Tap(load_library().api, 4, 8, native=native)
    found.arm("no_such_tensor-3")
    with pytest.raises(EngineError, match="no_such_tensor-3"):
        found.take(2)
