"""CUDA devices on the CPU whose work is done as late as CUDA allows: a wait that is missing shows in the bytes.

    with LateDevice() as late: ...    # cuda:0 and cuda:1, their streams, events and pinned memory, in every thread

Each stream is a queue. An operation on a device's memory goes into the queue of the calling thread's current stream,
and runs when somebody must wait for it: the host, or another stream that runs behind an event. Until then new memory
holds GARBAGE, so bytes that are read too early are wrong, and pinned memory that is overwritten too early is copied as
it is by then. An operation that the device does not know raises, so that nothing happens at once by accident.

A capture puts operations into a graph in place of the queue, and what CUDA does not allow beside it raises.

Not modelled: memory that is freed while another stream still uses it.
"""

import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

if find_spec("triton") is not None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

__all__ = ["LateDevice", "LateStream"]

GARBAGE = 0xEE
FREE_BYTES = 1 << 24
DEVICES = 2
HOST = torch.device("cpu")

FACTS = re.compile(
    "is_contiguous|dim|__len__|data_ptr|numel|element_size|stride|storage_offset|size|__hash__|is_inference"
)
ATTRIBUTES = re.compile("shape|dtype|ndim|layout|requires_grad|_version|itemsize")
VIEWS = re.compile("view|reshape|narrow|unsqueeze|squeeze|expand|transpose|flatten|select|detach|as_strided")
PURE = re.compile(
    "clamp|div|remainder|add|mul|sub|eq|ne|all|any|clone|count_nonzero|matmul|index_select|cumsum|full_like|zeros_like"
    "|cat|floor_divide|__floordiv__|__add__|__mul__|__eq__|__ne__|__getitem__|to"
)
READS = re.compile("tolist|item|equal|__bool__|__int__|__float__|__index__|__repr__")
FACTORIES = ("zeros", "empty", "full", "ones", "arange", "tensor")

_installed: list["LateDevice"] = []


class _Here(threading.local):
    """The calling thread's current device, and its current stream of each."""

    def __init__(self) -> None:
        self.index = 0
        self.streams: dict[int, LateStream] = {}


_here = _Here()


def _late() -> "LateDevice":
    return _installed[-1]


class LateStream:
    """A stream of a device: a queue, done as far as somebody had to wait."""

    def __init__(self, device: object = None, priority: int = 0) -> None:
        self.device = torch.device("cuda", _late().index_of(device))
        self.priority = priority
        self.steps: list[Callable[[], object]] = []
        self._done_count = 0
        _late().streams.append(self)

    def run_to(self, end: int) -> None:
        while self._done_count < end:
            step = self.steps[self._done_count]
            self._done_count += 1
            step()

    def synchronize(self) -> None:
        _late().check_wait()
        with _late().guard:
            _late().host_waits += 1
            self.run_to(len(self.steps))

    def wait_event(self, event: "LateEvent") -> None:
        marked = event.marked
        if self is _late().capturing:
            raise RuntimeError("a stream that is captured would wait for work outside of the capture")
        if marked is not None:
            stream, end = marked
            self.steps.append(lambda: stream.run_to(end))

    def wait_stream(self, other: "LateStream") -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: "LateEvent | None" = None) -> "LateEvent":
        event = event or LateEvent()
        event.record(self)
        return event


class LateEvent:
    """A place in a stream; before it is recorded, nobody waits for it."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        self.marked: tuple[LateStream, int] | None = None

    def record(self, stream: LateStream | None = None) -> None:
        stream = stream or _late().current_stream()
        self.marked = stream, len(stream.steps)

    def wait(self, stream: LateStream | None = None) -> None:
        (stream or _late().current_stream()).wait_event(self)

    def synchronize(self) -> None:
        _late().check_wait()
        with _late().guard:
            _late().host_waits += 1
            if self.marked is not None:
                self.marked[0].run_to(self.marked[1])


class LateGraph:
    """Operations that were captured on a stream; a replay gives them to the current one."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []

    def replay(self) -> None:
        _late().current_stream().steps += self.steps


class OnDevice(torch.Tensor):
    """Memory of a device; only streams touch what it holds."""

    device_index: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        late = _late()
        with late.guard:
            return late.call(func, args, dict(kwargs or {}))


def _plain(value: Any) -> Any:
    """Return the memory itself in place of every tensor on a device."""
    if isinstance(value, OnDevice):
        with torch._C.DisableTorchFunctionSubclass():
            return value.as_subclass(torch.Tensor)
    if isinstance(value, tuple | list):
        return type(value)(map(_plain, value))
    return value


def _shape_of(value: Any) -> Any:
    """Return what has the shape of a tensor and no values."""
    if isinstance(value, torch.Tensor):
        return _late().torch_to(_plain(value), torch.device("meta"))
    return type(value)(map(_shape_of, value)) if isinstance(value, tuple | list) else value


def _on_device(value: Any) -> list[OnDevice]:
    if isinstance(value, tuple | list):
        return [found for each in value for found in _on_device(each)]
    return [value] if isinstance(value, OnDevice) else []


class LateCudart:
    """Calls of the CUDA runtime that torch passes on."""

    def __init__(self) -> None:
        self.registered: dict[int, int] = {}
        """Bytes of host memory that are registered, by address."""
        self.bytes_max = 1 << 62
        """Most bytes that one registration takes."""
        self.registrations_max = 1 << 62

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802 - CUDA's name
        if size > self.bytes_max or address in self.registered or len(self.registered) >= self.registrations_max:
            return 1
        self.registered[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802 - CUDA's name
        return 0 if self.registered.pop(address, None) else 1


class LateDevice:
    """Installs itself in place of ``torch.cuda``; counts what it was asked for."""

    def __init__(self) -> None:
        self.guard = threading.RLock()
        self.streams: list[LateStream] = []
        self.host_waits = 0
        """Times that a thread waited for a stream or an event."""
        self.operations: Counter[str] = Counter()
        """Kernels and copies by name."""
        self.elements: Counter[str] = Counter()
        """Elements that they have written, by name."""
        self.snapshots = 0
        """Copies of host memory that were pinned."""
        self.allocated_bytes = 0
        """Device memory that was ever asked for."""
        self.runtime = LateCudart()
        self.capturing: LateStream | None = None
        """The stream that is captured now, if one is."""
        self._forbidden_to: int | None = None
        """Thread that a capture forbids what is unsafe; 0 for all, None while nothing is captured."""
        self._waits_raise = False
        self._pinned: list[tuple[int, int]] = []
        self._kept: list[torch.Tensor] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._defaults: list[LateStream] = []
        self.torch_to: Any = torch.Tensor.to

    def take_counts(self) -> tuple[int, int, int]:
        """Return operations, snapshots and waits of the host since the last call."""
        counts = self.operations.total(), self.snapshots, self.host_waits
        self.operations.clear()
        self.elements.clear()
        self.snapshots = self.host_waits = 0
        return counts

    # ---- devices and streams, by thread ----------------------------------------------------------------------

    def index_of(self, device: object = None) -> int:
        if isinstance(device, int):
            return device
        index = None if device is None else torch.device(device).index  # type: ignore[call-overload]
        return self.current_device() if index is None else index

    def current_device(self) -> int:
        return _here.index

    def set_device(self, device: object) -> None:
        _here.index = self.index_of(device)

    def current_stream(self, device: object = None) -> LateStream:
        index = self.index_of(device)
        return _here.streams.get(index, self._defaults[index])

    @contextmanager
    def stream(self, stream: LateStream) -> Iterator[None]:
        streams, index = _here.streams, self.current_device()
        _here.streams, _here.index = {**streams, stream.device.index: stream}, stream.device.index
        try:
            yield
        finally:
            _here.streams, _here.index = streams, index

    @contextmanager
    def device(self, device: object) -> Iterator[None]:
        before = self.current_device()
        self.set_device(device)
        try:
            yield
        finally:
            _here.index = before

    def synchronize(self, device: object = None) -> None:
        for stream in self.streams:
            stream.synchronize()

    @contextmanager
    def graph(self, graph: LateGraph, *, capture_error_mode: str = "global") -> Iterator[None]:
        stream = LateStream()
        with self.stream(stream):
            self.capturing = stream
            self._forbidden_to = 0 if capture_error_mode == "global" else threading.get_ident()
            try:
                yield
            finally:
                self.capturing = self._forbidden_to = None
        graph.steps, stream.steps = stream.steps, []

    def is_capturing(self) -> bool:
        return self.capturing is not None and self.current_stream() is self.capturing

    def set_sync_debug_mode(self, mode: str) -> None:
        self._waits_raise = mode == "error"

    def check_wait(self) -> None:
        """Raise where the calling thread must not wait for the device."""
        if self._waits_raise:
            raise RuntimeError("called a synchronizing CUDA operation")
        self.check_capture()

    def check_capture(self) -> None:
        """Raise where a capture forbids the calling thread to wait, or to pin memory."""
        if self._forbidden_to in (0, threading.get_ident()):
            raise RuntimeError("operation not permitted while a stream is captured")

    # ---- memory ----------------------------------------------------------------------------------------------

    def launch(self, name: str, index: int, step: Callable[[], object], elements: int = 0) -> None:
        """Give a device's current stream a step."""
        self.operations[name] += 1
        self.elements[name] += elements
        self.current_stream(index).steps.append(step)

    def _made(self, memory: torch.Tensor, index: int) -> OnDevice:
        made: OnDevice = torch.Tensor._make_subclass(OnDevice, memory)
        made.device_index = index
        return made

    def _garbage(self, like: torch.Tensor, index: int) -> OnDevice:
        memory = torch.empty(like.shape, dtype=like.dtype, device=HOST)
        self.allocated_bytes += memory.numel() * memory.element_size()
        if memory.numel():
            memory.view(-1).view(torch.uint8).fill_(GARBAGE)
        return self._made(memory, index)

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self._kept.append(tensor)
        self._pinned.append((tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()))
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(start <= at < end for start, end in self._pinned) or any(
            start <= at < start + size for start, size in self.runtime.registered.items()
        )

    def _copy(self, target: torch.Tensor, source: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy between devices and host; with pageable memory at either end the host waits."""
        device = _on_device([target, source])
        to, begin = _plain(target), _plain(source)
        self.launch("copy", device[0].device_index, lambda: to.copy_(begin), to.numel())
        on_host = [each for each in (target, source) if not isinstance(each, OnDevice)]
        if on_host and not (non_blocking and self._is_pinned(on_host[0])):
            self.current_stream(device[0].device_index).synchronize()

    def _moved(self, tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        """``torch.Tensor.to``."""
        place = next((torch.device(each) for each in (*args, kwargs.get("device")) if _is_device(each)), None)
        dtype = next((each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)
        if isinstance(tensor, OnDevice):
            if place is not None and place.type == "cpu":
                return self._read(tensor).to(dtype or tensor.dtype)
            if dtype in (None, tensor.dtype):
                return tensor
            converted: torch.Tensor = self._computed(self.torch_to, "to", (tensor, dtype), {})
            return converted
        plain = tensor if dtype is None else self.torch_to(tensor, dtype)
        if place is None or place.type != "cuda":
            return plain if place is None else self.torch_to(plain, place)
        with self.guard:
            made = self._garbage(plain, self.index_of(place))
            self._copy(made, plain, non_blocking=non_blocking)
        return made

    def _read(self, tensor: OnDevice) -> torch.Tensor:
        """Copy to the host, which waits."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST)
        with self.guard:
            self._copy(found, tensor, non_blocking=False)
        return found

    # ---- operations ------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func.__name__
        if name == "__get__":
            return self._attribute(func, args[0])
        if FACTS.fullmatch(name):
            return func(_plain(args[0]), *args[1:], **kwargs)
        if name == "copy_":
            self._copy(args[0], args[1], non_blocking=bool(kwargs.get("non_blocking") or args[2:3] == (True,)))
            return args[0]
        if name == "cpu":
            return self._read(args[0])
        if READS.fullmatch(name):
            read = [self._read(each) if isinstance(each, OnDevice) else each for each in args]
            return func(*read, **kwargs)
        if VIEWS.fullmatch(name) or (name == "__getitem__" and not _selects(args[1])):
            return self._viewed(func(_plain(args[0]), *args[1:], **kwargs), args[0])
        if name in ("__iter__", "unbind"):
            return iter([self._viewed(each, args[0]) for each in _plain(args[0]).unbind(0)])
        if "out" in kwargs or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")):
            return self._changed(func, name, args, kwargs)
        if PURE.fullmatch(name):
            return self._computed(func, name, args, kwargs)
        raise NotImplementedError(f"the late device does not know {name}")

    def _attribute(self, func: Any, tensor: OnDevice) -> Any:
        name = func.__self__.__name__
        if name == "is_cuda":
            return True
        if name == "device":
            return torch.device("cuda", tensor.device_index)
        if not ATTRIBUTES.fullmatch(name):
            raise NotImplementedError(f"the late device does not know the attribute {name}")
        return func(_plain(tensor))

    def _viewed(self, view: torch.Tensor, of: OnDevice) -> OnDevice:
        assert view.untyped_storage().data_ptr() == _plain(of).untyped_storage().data_ptr(), "a copy, not a view"
        return self._made(view, of.device_index)

    def _index(self, *values: Any) -> int:
        indices = {each.device_index for each in _on_device(values)}
        if len(indices) != 1:
            raise RuntimeError(f"expected all tensors to be on one device, found {sorted(indices)}")
        return indices.pop()

    def _changed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change a tensor in place, later."""
        target = kwargs.get("out", args[0])
        plain, plain_kwargs = _plain(args), {key: _plain(value) for key, value in kwargs.items()}
        written = len(args[2]) * args[0][0].numel() if name == "index_copy_" else target.numel()
        index = self._index(list(args), list(kwargs.values()))
        self.launch(name, index, lambda: func(*plain, **plain_kwargs), written)
        return target

    def _computed(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a new tensor, later."""
        index = self._index(list(args), list(kwargs.values()))
        shape = func(*map(_shape_of, args), **{key: _shape_of(value) for key, value in kwargs.items()})
        made = self._garbage(shape, index)
        plain, plain_kwargs, result = _plain(args), {key: _plain(value) for key, value in kwargs.items()}, _plain(made)
        self.launch(name, index, lambda: result.copy_(func(*plain, **plain_kwargs)), result.numel())
        return made

    # ---- in place of torch.cuda -------------------------------------------------------------------------------

    def __enter__(self) -> "LateDevice":
        _installed.append(self)
        self.set_device(0)
        self._defaults = [LateStream(index) for index in range(DEVICES)]
        late = self

        def moved(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return late._moved(tensor, *args, **kwargs)

        def pinned(tensor: torch.Tensor) -> torch.Tensor:
            late.check_capture()
            late.snapshots += 1
            return late._pin(tensor.clone())

        self._put(torch.Tensor, "to", moved)
        self._put(torch.Tensor, "pin_memory", pinned)
        for name in FACTORIES:
            self._put(torch, name, self._factory(name, getattr(torch, name)))
        for name in ("current_device", "set_device", "current_stream", "stream", "device", "synchronize"):
            self._put(torch.cuda, name, getattr(self, name))
        self._put(torch.cuda, "Stream", LateStream)
        self._put(torch.cuda, "Event", LateEvent)
        self._put(torch.cuda, "cudart", lambda: self.runtime)
        self._put(torch.cuda, "CUDAGraph", LateGraph)
        self._put(torch.cuda, "graph", self.graph)
        self._put(torch.cuda, "is_current_stream_capturing", self.is_capturing)
        self._put(torch.cuda, "_sleep", lambda cycles: None)  # all is late already
        self._put(torch.cuda, "set_sync_debug_mode", self.set_sync_debug_mode)
        self._put(torch.cuda, "memory_allocated", lambda device=None: 0)
        self._put(torch.cuda, "mem_get_info", lambda device=None: (FREE_BYTES, FREE_BYTES))
        self._put(torch.cuda, "empty_cache", lambda: None)
        if find_spec("triton") is not None:
            self._take_kernels()
        return self

    def _take_kernels(self) -> None:
        """Have Triton's kernels interpreted, when their turn comes."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            step = partial(InterpretedFunction(kernel.fn).run, *_plain(args), grid=grid, warmup=False, **kwargs)
            self.launch("kernel", self._index(*args), step)

        self._put(JITFunction, "run", run)

    def __exit__(self, *_: object) -> None:
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)
        self._undo.clear()
        _installed.pop()

    def _put(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def _factory(self, name: str, make: Any) -> Any:
        def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != "cuda":
                found: torch.Tensor = make(*args, device=device, **kwargs)
                return self._pin(found) if pin_memory else found
            with self.guard:
                values = make(*args, device=HOST, **kwargs)
                on_device = self._garbage(values, self.index_of(device))
                plain = _plain(on_device)
                if name != "empty":
                    self.launch(name, on_device.device_index, lambda: plain.copy_(values), values.numel())
                if name == "tensor":
                    self.current_stream(device).synchronize()  # from pageable memory
            return on_device

        return made


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu"))


def _selects(at: Any) -> bool:
    """Tell whether an index makes a new tensor and not a view."""
    return isinstance(at, torch.Tensor | list) or (isinstance(at, tuple) and any(map(_selects, at)))
