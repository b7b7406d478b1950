"""The tensors of a file: the weights and the state of its programs.

A tensor that does not share its memory is a tensor of the safetensors entry, with its own dtype and
shape. Several tensors may share memory (tied weights, a buffer and a view of it). The file holds
this memory once, as bytes, and each tensor is a view of it, so a write to one remains visible in
the others. Tensors of dtypes that safetensors does not have are bytes too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import load, save

from tsfunc.errors import FileFormatError
from tsfunc.ops.dims import memory_span
from tsfunc.program.fields import Field
from tsfunc.program.files.json_values import NoFileForm, ValueReader
from tsfunc.types.values import plain_name

# The dtypes that every version of safetensors has.
_NATIVE = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_ALIGNED = 16
_MOST = 1 << 62


@dataclass
class _Stored:
    """A range of memory, and the tensors that lie in it."""

    tensors: list[str]
    first: int  # byte offset in the storage
    last: int


class TensorWriter:
    """Collects the tensors of some programs, each once."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._tensors: dict[str, torch.Tensor] = {}
        self._states: dict[int, torch.Tensor] = {}

    def name(self, tensor: torch.Tensor) -> str:
        """Return the name of a tensor in the file.

        Raises:
            NoFileForm: a file can't hold a tensor of this type or layout.
        """
        name = self._names.get(id(tensor))
        if name is None:
            _require_plain(tensor)
            name = self._names[id(tensor)] = f"t{len(self._names)}"
            self._tensors[name] = tensor
        return name

    def generator(self, generator: torch.Generator) -> str:
        """Return the name of the tensor with the current state of a generator."""
        state = self._states.setdefault(id(generator), generator.get_state())
        return self.name(state)

    def written(self) -> tuple[dict[str, Any], bytes]:
        """Return the records of the tensors by name, and their memory as safetensors."""
        stored: dict[tuple[Any, int], _Stored] = {}
        for name, tensor in self._tensors.items():
            key, first, last = _span(name, tensor)
            stored_memory = stored.setdefault(key, _Stored([], first, last))
            stored_memory.tensors.append(name)
            stored_memory.first, stored_memory.last = (
                min(stored_memory.first, first),
                max(stored_memory.last, last),
            )
        records: dict[str, Any] = {}
        memory: dict[str, torch.Tensor] = {}
        for each in stored.values():
            self._store(each, records, memory)
        return records, save(memory)

    def _store(
        self, stored: _Stored, records: dict[str, Any], memory: dict[str, torch.Tensor]
    ) -> None:
        name, *others = stored.tensors
        tensor = self._tensors[name]
        if not others and (tensor.is_contiguous() or _is_resolved_first(tensor)):
            plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            records[name] = {**_facts(tensor), "memory": name}
            if plain.dtype not in _NATIVE:
                records[name].update(strides=list(plain.stride()), first=0)
                plain = plain.flatten().view(torch.uint8)
            memory[name] = plain
            return
        first = stored.first // _ALIGNED * _ALIGNED
        memory[name] = _storage_bytes(tensor, first, stored.last)
        for stored_tensor in stored.tensors:
            view = self._tensors[stored_tensor]
            offset = view.storage_offset() * view.element_size() - first
            records[stored_tensor] = {
                **_facts(view),
                "memory": name,
                "strides": list(view.stride()),
                "first": offset // view.element_size(),
            }


def _require_plain(tensor: torch.Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise NoFileForm(f"a tensor of layout {tensor.layout}")
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise NoFileForm(f"a tensor of class {type(tensor).__name__}")
    if tensor.device.type == "meta":
        raise NoFileForm("a tensor without data, of device meta")


def _facts(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        "dtype": plain_name(tensor.dtype),
        "shape": list(tensor.shape),
        "device": str(tensor.device),
        "requires_grad": tensor.requires_grad,
        "parameter": isinstance(tensor, torch.nn.Parameter),
    }


def _is_resolved_first(tensor: torch.Tensor) -> bool:
    """True for a lazy conjugate or negative, and for a tensor without elements."""
    return tensor.is_conj() or tensor.is_neg() or not tensor.numel()


def _span(name: str, tensor: torch.Tensor) -> tuple[tuple[Any, int], int, int]:
    """Return the memory that a tensor lies in, and its first and last byte there."""
    if _is_resolved_first(tensor):
        return (name, 0), 0, 0
    storage, size = tensor.untyped_storage(), tensor.element_size()
    first = int(tensor.storage_offset()) * size
    last = first + int(memory_span(tensor.shape, tensor.stride())) * size
    return (tensor.device, storage.data_ptr()), first, last


def _storage_bytes(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    data = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    data.set_(tensor.untyped_storage(), first, (last - first,))  # type: ignore[call-overload]
    return data.cpu()


class TensorReader:
    """Makes the tensors of a file, each once.

    Args:
        data: the safetensors entry.
        where: the name of the entry in errors.
        values: reads devices.
    """

    def __init__(self, records: Field, data: bytes, where: str, values: ValueReader) -> None:
        self._records = records.mapping()
        self._values = values
        try:
            self._memory = load(data) if data else {}
        except Exception as error:  # SafetensorError, and torch's errors for invalid shapes
            raise FileFormatError(f"{where}: not safetensors data: {error}") from None
        self._made: dict[str, torch.Tensor] = {}
        self._generators: dict[tuple[str, torch.device], torch.Generator] = {}
        self._on_devices: dict[tuple[str, torch.device], torch.Tensor] = {}
        used = {record.at("memory").text() for record in self._records.values()}
        if used != set(self._memory):
            raise FileFormatError(
                f"{where}: expected the tensors {sorted(used)[:10]} of the programs, got "
                f"{sorted(self._memory)[:10]}."
            )

    def tensor(self, field: Field) -> torch.Tensor:
        name = field.text()
        if name not in self._made:
            if name not in self._records:
                field.fail(f"there is no tensor {name[:40]!r}")
            self._made[name] = self._make(self._records[name])
        return self._made[name]

    def generator(self, field: Field, device: torch.device) -> torch.Generator:
        """Return the generator with a named state on a device; each name and device has one."""
        key = field.text(), device
        if key not in self._generators:
            try:
                generator = torch.Generator(device)
                generator.set_state(self.tensor(field).cpu())
            except (RuntimeError, TypeError) as error:
                field.fail(f"not the state of a generator of {device}: {error}")
            self._generators[key] = generator
        return self._generators[key]

    def _make(self, record: Field) -> torch.Tensor:
        record.require_keys(
            ("dtype", "shape", "device", "requires_grad", "parameter", "memory"),
            ("strides", "first"),
        )
        dtype = self._values.dtype(record.at("dtype"))
        shape = [size.integer(0) for size in record.at("shape").items()]
        memory = self._memory_on(record.at("memory").text(), record.at("device"))
        if record.get("strides") is None:
            if memory.dtype is not dtype or list(memory.shape) != shape:
                record.fail(f"its data is {memory.dtype} of shape {list(memory.shape)}")
            tensor = memory
        else:
            tensor = self._view(record, memory, dtype, shape)
        if dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            record.fail("its memory has other bytes than those of false and true")
        wants_grad = record.at("requires_grad").flag()
        if wants_grad and not (dtype.is_floating_point or dtype.is_complex):
            record.fail(f"a tensor of {dtype} can't require grad")
        if record.at("parameter").flag():
            return torch.nn.Parameter(tensor, wants_grad)
        return tensor.requires_grad_(wants_grad)

    def _view(
        self, record: Field, memory: torch.Tensor, dtype: torch.dtype, shape: list[int]
    ) -> torch.Tensor:
        """Return a tensor that is a view of bytes, which other tensors may share."""
        if memory.dtype is not torch.uint8 or memory.dim() != 1:
            record.at("memory").fail("the memory of views is bytes")
        strides = [step.integer(0) for step in record.at("strides").items(len(shape))]
        first = record.at("first").integer(0)
        size = dtype.itemsize
        numbers = memory[: len(memory) // size * size].view(dtype)
        count = math.prod(shape)
        if count >= _MOST:
            record.at("shape").fail("it has too many elements")
        if count and first + memory_span(shape, strides) > len(numbers):
            record.fail(f"it goes beyond its memory of {len(memory)} bytes")
        try:
            return numbers.as_strided(shape, strides, first if count else 0)
        except RuntimeError as error:
            record.fail(str(error))

    def _memory_on(self, name: str, device_field: Field) -> torch.Tensor:
        """Return memory on a device; all tensors that share the memory get the same."""
        device = self._values.device(device_field)
        key = name, device
        if key not in self._on_devices:
            memory = self._memory[name]
            try:
                self._on_devices[key] = memory if device.type == "cpu" else memory.to(device)
            except (RuntimeError, AssertionError) as error:
                device_field.fail(
                    f"there is no device {device} here ({error}); load(path, device=...) puts "
                    f"everything on another"
                )
        return self._on_devices[key]
