"""A real model written anew in parts, as gguf-split does it."""

from __future__ import annotations

from pathlib import Path

import gguf


def write_split(source: Path, folder: Path, *, name: str, tensors: int) -> list[Path]:
    """The model at `source` under another `general.name`, in files of so many tensors each, in order."""
    folder.mkdir(parents=True)
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(folder / f"{name}.gguf", architecture, split_max_tensors=tensors)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        value = name if key == "general.name" else field.contents()
        items = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, value, field.types[0], items)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return sorted(folder.glob("*-of-*.gguf"))
