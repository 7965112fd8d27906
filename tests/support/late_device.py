"""CUDA devices on the CPU whose work is done as late as CUDA allows: a wait that is missing shows in the bytes.

    with LateDevice() as late: ...    # cuda:0 and cuda:1, their streams, events and pinned memory, in every thread

Each stream is a queue. An operation on a device's memory goes into the queue of the calling thread's current stream,
and runs when somebody must wait for it: the host, or another stream that runs behind an event. Until then new memory
holds GARBAGE, so bytes that are read too early are wrong, and pinned memory that is overwritten too early is copied as
it is by then. What an operation does, its schema in ATen says: it makes a view, changes a tensor, makes a new one, or
returns a value that the host must wait for.

A capture puts operations into a graph in place of the queue, and what CUDA does not allow beside it raises.

Not modelled: memory that is freed while another stream still uses it.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_map_only

if find_spec("triton") is not None:
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

GARBAGE = 0xEE
FREE_BYTES = 1 << 24
DEVICES = 2
HOST = torch.device("cpu")

FACTORIES = ("zeros", "empty", "full", "ones", "arange", "tensor")

OWN_NAMES = (
    *("current_device", "set_device", "current_stream", "stream", "device", "synchronize", "graph"),
    "set_sync_debug_mode",
)
"""Names of ``torch.cuda`` that ``LateDevice`` has itself."""

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
        self.done_count = 0
        _late().streams.append(self)

    def run_to(self, end: int) -> None:
        while self.done_count < end:
            step = self.steps[self.done_count]
            self.done_count += 1
            step()

    def synchronize(self) -> None:
        self.record_event().synchronize()

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

    def query(self) -> bool:
        return self.marked is None or self.marked[0].done_count >= self.marked[1]

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
    plain: torch.Tensor
    """The memory itself, as a tensor of the host."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # all goes to the operations

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch says less of it than its documentation
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        late = _late()
        with late.guard:
            return late.call(func, args, dict(kwargs or {}))

    @classmethod
    def over(cls, memory: torch.Tensor, index: int) -> "OnDevice":
        made: OnDevice = torch.Tensor._make_subclass(cls, memory)
        made.plain, made.device_index = memory, index
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda", self.device_index)

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    def cpu(self, *_: object, **__: object) -> torch.Tensor:
        return _late().read(self)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: object, **__: object) -> Any:
        raise TypeError("a tensor on a device cannot be made an array; copy it to the host first")

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]  # torch says no types
        return f"OnDevice({self.cpu()!r})"


def _plain(values: Any) -> Any:
    """Return the memory itself in place of every tensor on a device."""
    return tree_map_only(OnDevice, lambda tensor: tensor.plain, values)


def _index(*values: Any) -> int:
    """Return the device that an operation on these values runs on; indices, which come in a list, may be the host's."""
    places = {str(each.device) for each in values if isinstance(each, torch.Tensor) and each.dim()}
    if len(places) > 1:
        raise RuntimeError(f"expected all tensors to be on one device, found {sorted(places)}")
    return next(each.device_index for each in tree_flatten(values)[0] if isinstance(each, OnDevice))


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
        self._patch = pytest.MonkeyPatch()
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

    def _garbage(self, like: torch.Tensor, index: int) -> OnDevice:
        memory = torch.empty(like.shape, dtype=like.dtype, device=HOST)
        self.allocated_bytes += memory.numel() * memory.element_size()
        if memory.numel():
            memory.view(-1).view(torch.uint8).fill_(GARBAGE)
        return OnDevice.over(memory, index)

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
        """Copy between devices and host; with pageable memory the host waits, unless it sends a number."""
        (index,) = {each.device_index for each in (target, source) if isinstance(each, OnDevice)}
        to, begin = _plain((target, source))
        self.launch("copy", index, lambda: to.copy_(begin), to.numel())
        host = source if isinstance(target, OnDevice) else target
        is_number = host is source and not host.dim()
        if not isinstance(host, OnDevice) and not is_number and not (non_blocking and self._is_pinned(host)):
            self.current_stream(index).synchronize()

    def _moved(self, tensor: torch.Tensor, *args: Any, non_blocking: bool = False, **kwargs: Any) -> torch.Tensor:
        """``torch.Tensor.to``."""
        place = next((torch.device(each) for each in (*args, kwargs.get("device")) if _is_device(each)), None)
        dtype = next((each for each in (*args, kwargs.get("dtype")) if isinstance(each, torch.dtype)), None)
        if isinstance(tensor, OnDevice):
            if place is not None and place.type == "cpu":
                return self.read(tensor).to(dtype or tensor.dtype)
            return tensor if dtype is None else self.torch_to(tensor, dtype)
        plain = tensor if dtype is None else self.torch_to(tensor, dtype)
        if place is None or place.type != "cuda":
            return plain if place is None else self.torch_to(plain, place)
        with self.guard:
            made = self._garbage(plain, self.index_of(place))
            self._copy(made, plain, non_blocking=non_blocking)
        return made

    def read(self, tensor: OnDevice) -> torch.Tensor:
        """Copy to the host, which waits."""
        found = torch.empty(tensor.shape, dtype=tensor.dtype, device=HOST)
        with self.guard:
            self._copy(found, tensor, non_blocking=False)
        return found

    # ---- operations ------------------------------------------------------------------------------------------

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation of ATen as its schema says."""
        schema = func._schema
        aliases = [each.alias_info for each in schema.returns]
        if func is torch.ops.aten.copy_.default:
            self._copy(args[0], args[1], non_blocking=args[2:3] == (True,) or kwargs.get("non_blocking", False))
            return args[0]
        if not any(isinstance(each.type, torch.TensorType | torch.ListType) for each in schema.returns):
            return func(*tree_map_only(OnDevice, self.read, args), **kwargs)
        if schema.is_mutable:
            return self._changed(func, args, kwargs)
        if any(aliases):
            index = _index(*args)
            return tree_map_only(torch.Tensor, lambda view: OnDevice.over(view, index), func(*_plain(args), **kwargs))
        return self._computed(func, args, kwargs)

    def _changed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Change a tensor in place, later."""
        name, target = _name(func), kwargs.get("out", args[0])
        written = args[3] if name == "index_copy_" else target
        plain, plain_kwargs = _plain((args, kwargs))
        self.launch(name, _index(*args, *kwargs.values()), lambda: func(*plain, **plain_kwargs), written.numel())
        return target

    def _computed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute a new tensor, later."""
        index = _index(*args, *kwargs.values())
        plain, plain_kwargs = _plain((args, kwargs))
        shape_args = tree_map_only(torch.Tensor, lambda each: torch.empty_like(each, device="meta"), plain)
        made = self._garbage(func(*shape_args, **plain_kwargs), index)
        result = made.plain
        self.launch(_name(func), index, lambda: result.copy_(func(*plain, **plain_kwargs)), result.numel())
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

        patch = self._patch.setattr
        patch(torch.Tensor, "to", moved)
        patch(torch.Tensor, "pin_memory", pinned)
        for name in FACTORIES:
            patch(torch, name, self._factory(name, getattr(torch, name)))
        in_place = {
            **{name: getattr(self, name) for name in OWN_NAMES},
            "Stream": LateStream,
            "Event": LateEvent,
            "CUDAGraph": LateGraph,
            "cudart": lambda: self.runtime,
            "is_current_stream_capturing": self.is_capturing,
            "_sleep": lambda cycles: None,  # all is late already
            "memory_allocated": lambda device=None: 0,
            "mem_get_info": lambda device=None: (FREE_BYTES, FREE_BYTES),
            "empty_cache": lambda: None,
        }
        for name, value in in_place.items():
            patch(torch.cuda, name, value)
        if find_spec("triton") is not None:
            self._take_kernels()
        return self

    def _take_kernels(self) -> None:
        """Have Triton's kernels interpreted, when their turn comes."""

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            step = partial(InterpretedFunction(kernel.fn).run, *_plain(args), grid=grid, warmup=False, **kwargs)
            self.launch("kernel", _index(*args), step)

        self._patch.setattr(JITFunction, "run", run)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()
        _installed.pop()

    def _factory(self, name: str, make: Any) -> Any:
        def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            if device is None or torch.device(device).type != "cuda":
                found: torch.Tensor = make(*args, device=device, **kwargs)
                return self._pin(found) if pin_memory else found
            with self.guard:
                values = make(*args, device=HOST, **kwargs)
                on_device = self._garbage(values, self.index_of(device))
                plain = on_device.plain
                if name != "empty":
                    self.launch(name, on_device.device_index, lambda: plain.copy_(values), values.numel())
                if name == "tensor":
                    self.current_stream(device).synchronize()  # from pageable memory
            return on_device

        return made


def _is_device(value: object) -> bool:
    return isinstance(value, torch.device) or (isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu"))


def _name(func: Any) -> str:
    name: str = func._schema.name.partition("::")[2]
    return name
