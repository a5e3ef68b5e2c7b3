"""What there is to compute on: CPUs, and the devices that llama.cpp's backends offer."""

from __future__ import annotations

import ctypes as c
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from meshnet.engine.base import EngineError
from meshnet.engine.library import Library

_GPU_TYPES = (1, 2)
"""GGML_BACKEND_DEVICE_TYPE_GPU and _IGPU."""


@dataclass(frozen=True)
class Device:
    """One accelerator, by llama.cpp's name for it (`CUDA0`, `MTL0`)."""

    address: int
    name: str
    description: str
    memory: int
    """Bytes."""


@dataclass(frozen=True)
class Chosen:
    """What a shard computes on; `layers` are those of the shard that go to the devices, -1: all."""

    devices: tuple[Device, ...]
    layers: int

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(device.address for device in self.devices)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"{device.name}:{device.description}" for device in self.devices)


def accelerators(library: Library) -> tuple[Device, ...]:
    """The GPUs that this build of llama.cpp can use, in its order."""
    api = library.api
    found = []
    for index in range(api.ggml_backend_dev_count()):
        address = api.ggml_backend_dev_get(index)
        if api.ggml_backend_dev_type(address) not in _GPU_TYPES:
            continue
        free, total = c.c_size_t(), c.c_size_t()
        api.ggml_backend_dev_memory(address, c.byref(free), c.byref(total))
        name = api.ggml_backend_dev_name(address).decode()
        found.append(Device(address, name, api.ggml_backend_dev_description(address).decode(), total.value))
    return tuple(found)


def choose_devices(library: Library, device: str, gpu_layers: int) -> Chosen:
    """What `--device` and `--gpu-layers` mean on this machine. Raises EngineError for a device it lacks.

    `auto` takes what there is for as many layers as asked for; `cuda`, `cuda:N` and `metal` take all layers
    where none are asked for.
    """
    found = accelerators(library)
    if device == "cpu" or (device == "auto" and (gpu_layers == 0 or not found)):
        return Chosen((), 0)
    if device == "auto":
        return Chosen(found, gpu_layers)
    match = re.fullmatch(r"(cuda|metal)(?::(\d+))?", device)
    if match is None:
        raise EngineError(f"device is {device!r}; auto, cpu, cuda, cuda:N and metal are possible")
    prefix = "CUDA" if match[1] == "cuda" else "MTL"
    fitting = [d for d in found if d.name.upper().startswith(prefix) or match[1] in d.name.lower()]
    index = int(match[2] or 0)
    if index >= len(fitting):
        has = ", ".join(d.name for d in found) or "no accelerator"
        raise EngineError(f"device {device} is not there: this build of llama.cpp sees {has}")
    return Chosen((fitting[index],), gpu_layers or -1)


def hardware_name(chosen: Chosen) -> str:
    """For people: the accelerator's name where one computes, else the CPU's."""
    if chosen.devices:
        return " + ".join(device.description for device in chosen.devices)
    return cpu_name()


def cpu_name() -> str:
    """The CPU's marketing name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("model name", "Model")):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
