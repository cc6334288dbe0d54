"""A simulated GPU on a CPU, as the worker sees it: a delayed queue, separate tensors, and recorded graphs.

The device's operations are queued. They run when the host waits, for an event or for the whole device. So if the host
rewrites a buffer too early, or reads one too early, the numbers are wrong, as on a GPU. Tensors of the device and of
the host cannot be mixed, and the host cannot wait while a graph is recorded. Not simulated: several streams (all are
one queue) and kernels (each operation is torch's for CPUs).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import FakeWork, ProcessGroup, ReduceOp, Work
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only

aten = torch.ops.aten
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")

# Composite operations that run as a whole. Other composite operations are decomposed, because some of their parts are
# views.
_WHOLE = {aten.linear.default, aten.rms_norm.default, aten.scaled_dot_product_attention.default}
# Operations that return a value to the host, or whose result's size depends on values.
_WAITING = {
    aten._local_scalar_dense.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.bincount.default,
    aten.repeat_interleave.Tensor,
}
_INDEXING = {aten.index.Tensor, aten.index_put_.default}
# Operations that only GPUs have.
_STAND_INS: dict[Any, Callable[..., Tensor]] = {
    aten.mm.dtype: lambda a, b, dtype: torch.mm(a.to(dtype), b.to(dtype)),
}
# Operations whose results have another memory order on a GPU than on a CPU.
_ORDERS = {aten.scaled_dot_product_attention.default: (0, 2, 1, 3)}

# Operations that allocate memory without writing to it.
_ALLOCATING = {aten.empty.memory_format, aten.empty_strided.default, aten.empty_like.default, aten.new_empty.default}

_GRAPH = signature(torch.cuda.graph)


class OnGpu(Tensor):
    """A tensor of the device. ``memory`` is a CPU tensor of the same layout, for its future content."""

    memory: Tensor
    device = CUDA  # type: ignore[assignment]  # torch itself, which may have no driver for it, knows another one
    is_cuda = True  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, memory: Tensor) -> OnGpu:
        made: OnGpu = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, memory.size(), memory.stride(), memory.storage_offset(), dtype=memory.dtype, device="meta"
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Indexing would ask the device's driver, so it is decomposed first."""
        if func is Tensor.__getitem__:
            view, indexes = _bracketed(*args)
            return aten.index(view, indexes) if indexes else view
        if func is Tensor.__setitem__:
            view, indexes = _bracketed(*args[:2])
            if not isinstance(args[2], Tensor):
                value = torch.full((), args[2], dtype=view.dtype, device=CUDA)
                return aten.index_put_(view, indexes, value) if indexes else view.fill_(args[2])
            return aten.index_put_(view, indexes, args[2]) if indexes else view.copy_(args[2])
        if func is Tensor.tolist:
            return args[0].cpu().tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is asked of the device when the simulation has ended")


class Gpu(TorchDispatchMode):
    """The device. ``waits`` lists what the host waited for, except events and whole synchronizations.

    ``launched`` counts the entries of the queue (a graph is one), ``replays`` the replayed graphs, and ``exchanges``
    the NCCL operations outside of replays. A device that ``is_fast`` runs everything at once, so that values that the
    host has not read in time are lost.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.launched = self.replays = self.exchanges = 0
        self.is_fast = False
        self._queue: deque[Callable[[], object]] = deque()
        self._recording: list[Callable[[], object]] | None = None
        self._pinned: set[int] = set()

    # ------------------------------------------------------------ the queue

    def launch(self, work: Callable[[], object]) -> None:
        """Add work to the queue, or to the graph that is being recorded."""
        if self._recording is not None:
            self._recording.append(work)
            return
        self.launched += 1
        self._queue.append(work)
        if self.is_fast:
            self.run()

    def run(self, until: Callable[[], bool] = lambda: False) -> None:
        """Run the queue until ``until`` holds, or completely."""
        assert self._recording is None, "the host waits while a graph is recorded"
        with _disable_current_modes(), torch.inference_mode():
            while self._queue and not until():
                self._queue.popleft()()

    def _wait(self, what: str) -> None:
        self.waits.append(what)
        self.run()

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function`` of tensors as one kernel. It is one launch, and may write to its arguments."""

        def launch(*args: Any) -> Any:
            inner = tree_map_only(OnGpu, lambda tensor: tensor.memory, args)
            with _disable_current_modes():
                return self._compute(function, function, inner, {})

        return launch

    # ------------------------------------------------------------ torch's operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, Tensor)]
        here = any(isinstance(tensor, OnGpu) for tensor in tensors)
        if func.namespace == "c10d":
            return self._exchange(func, args, kwargs, here)
        if func.overloadpacket is aten.to:
            func, args, kwargs = _as_copy(args, kwargs)
            if func is None:
                return args[0]
        asked = torch.device(kwargs["device"]) if kwargs.get("device") is not None else None
        if here and asked is not None and asked.type == "meta":
            kwargs["device"] = asked = CUDA  # torch takes the device for a meta device
        if func not in _WHOLE and func not in _WAITING:
            with self:
                taken_apart = func.decompose(*args, **kwargs)
            if taken_apart is not NotImplemented:
                return taken_apart
        if not here and (asked is None or asked.type != "cuda"):
            return self._on_host(func, args, kwargs)
        if func is aten._to_copy.default and asked is not None and (asked.type == "cuda") != here:
            return self._across(args[0], kwargs)
        if func is aten.copy_.default:
            return self._copy(*args, **kwargs)
        waits = self._why_it_waits(func, args, tensors)
        if func in _ALLOCATING:
            return OnGpu(self._allocated(func, args, kwargs))
        if asked is not None:
            kwargs["device"] = CPU
        kwargs.pop("pin_memory", None)
        inner, named = tree_map_only(OnGpu, lambda tensor: tensor.memory, (args, kwargs))
        if waits:
            self._wait(waits)
        if waits or func.is_view:
            return tree_map_only(Tensor, OnGpu, func(*inner, **named))
        if func._schema.is_mutable:
            self.launch(lambda: func(*inner, **named))
            return args[0]
        return self._compute(_STAND_INS.get(func, func), func, inner, named)

    def _exchange(self, func: Any, args: Any, kwargs: dict[str, Any], here: bool) -> Any:
        """An exchange between ranks. On the host all wait at once. On the device it is queued, as with NCCL."""
        if not here:
            self.run()
            return func(*args, **kwargs)
        inner = tree_map_only(OnGpu, lambda tensor: tensor.memory, args)
        group = next(ProcessGroup.unbox(each) for each in args if isinstance(each, torch.ScriptObject))
        captured = self._recording is not None
        self.exchanges += 1

        def work() -> None:
            uniform = torch.tensor([captured, -captured])
            group.allreduce(uniform, ReduceOp.MIN).wait()
            assert not uniform.sum(), f"{func} is captured by some ranks, and by others not"
            found = func(*inner, **kwargs)
            Work.unbox(found[-1] if isinstance(found, tuple) else found).wait()

        self.launch(work)
        at_once = FakeWork().boxed()
        return at_once if len(func._schema.returns) == 1 else (args[0], at_once)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        made = func(*args, **kwargs)
        if "device" in kwargs and made.is_meta and not made.dim():
            made = func(*args, **kwargs | {"device": CPU})  # a number that torch wraps for a tensor of the device
        if pinned:
            self._pinned.add(made.untyped_storage().data_ptr())
        return made

    def _why_it_waits(self, func: Any, args: Any, tensors: list[Tensor]) -> str | None:
        if func in _WAITING:
            return str(func)
        if func in _INDEXING:
            indexes = [leaf for leaf in tree_flatten(args[1])[0] if isinstance(leaf, Tensor)]
            odd = any(not isinstance(index, OnGpu) or index.dtype == torch.bool for index in indexes)
            return f"{func} by what lies on the host, or by a mask" if odd else None
        strangers = [tensor for tensor in tensors if not isinstance(tensor, OnGpu) and tensor.dim()]
        assert not strangers, f"{func} mixes tensors of the device with tensors of the host"
        return None

    def _allocated(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
        inner = tree_map_only(OnGpu, lambda tensor: tensor.memory, args)
        made: Tensor = func(*inner, **{**kwargs, "device": CPU, "pin_memory": False})
        _poison(made)
        return made

    def _compute(self, run: Callable[..., Any], func: Any, inner: Any, named: Any) -> Any:
        """Allocate the results now, and queue the computation of their values."""
        shapes = func(
            *_as_meta(inner), **({**_as_meta(named), "device": "meta"} if "device" in named else _as_meta(named))
        )
        if order := _ORDERS.get(func):
            shapes = shapes.permute(order).contiguous().permute(order)
        memory = tree_map(lambda meta: torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype), shapes)

        def work() -> None:
            found = run(*inner, **named)
            for place, value in zip(tree_flatten(memory)[0], tree_flatten(found)[0], strict=True):
                place.copy_(value)

        for place in tree_flatten(memory)[0]:
            _poison(place)
        self.launch(work)
        return tree_map_only(Tensor, OnGpu, memory)

    def _across(self, source: Tensor, kwargs: dict[str, Any]) -> Tensor:
        """A copy of ``source`` on the other side: host or device."""
        dtype = kwargs.get("dtype") or source.dtype
        if isinstance(source, OnGpu):
            self._wait("a copy to the host")
            return source.memory.to(dtype, copy=True)
        made = OnGpu(torch.empty(source.shape, dtype=dtype))
        return self._copy(made, source, non_blocking=kwargs.get("non_blocking", False))

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        to, what = (tensor.memory if isinstance(tensor, OnGpu) else tensor for tensor in (target, source))
        crosses = isinstance(target, OnGpu) != isinstance(source, OnGpu)
        host = source if isinstance(target, OnGpu) else target
        if crosses and not (non_blocking and host.untyped_storage().data_ptr() in self._pinned):
            self._wait("a copy that blocks" if not non_blocking else "a copy of memory that is not pinned")
            to.copy_(what)
        else:
            self.launch(lambda: to.copy_(what))
        return target

    # ------------------------------------------------------------ torch.cuda

    @contextmanager
    def recording(self, *args: Any, **options: Any) -> Iterator[None]:
        """Replaces torch.cuda.graph."""
        graph: Graph = _GRAPH.bind(*args, **options).arguments["cuda_graph"]
        self.run()
        self._recording = graph.works
        try:
            yield
        finally:
            self._recording = None


class Graph:
    """Replaces torch.cuda.CUDAGraph."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.works: list[Callable[[], object]] = []

    def replay(self) -> None:
        works = list(self.works)
        self._gpu.replays += 1
        self._gpu.launch(lambda: [work() for work in works])


class Event:
    """Replaces torch.cuda.Event."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._recorded, self._reached = 0, 0

    def record(self) -> None:
        self._recorded += 1
        self._gpu.launch(self._reach)

    def _reach(self) -> None:
        self._reached += 1

    def synchronize(self) -> None:
        self._gpu.run(lambda: self._reached == self._recorded)


def _as_copy(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
    """The copy operation of ``Tensor.to`` with its arguments, or None if it copies nothing. torch asks the driver."""
    named = dict(kwargs) | {"dtype": kwargs.get("dtype"), "device": kwargs.get("device")}
    for argument in args[1:]:
        if isinstance(argument, (torch.dtype, torch.device)):
            named["dtype" if isinstance(argument, torch.dtype) else "device"] = argument
    dtype, device = named["dtype"] or args[0].dtype, torch.device(named["device"] or args[0].device)
    if isinstance(args[0], OnGpu) and device.type == "meta":
        device = CUDA  # torch takes the device for a meta device
    same = dtype == args[0].dtype and device.type == args[0].device.type and not named.get("copy")
    options = {"dtype": dtype, "device": device, "non_blocking": named.get("non_blocking", False)}
    return None if same else aten._to_copy.default, args[:1], options


def _bracketed(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """``tensor[key]`` as a view, and the index tensors by dimension."""
    keys = list(key) if isinstance(key, tuple) else [key]
    indexes: list[Tensor | None] = []
    for at, part in enumerate(keys):
        if part is None:
            tensor = tensor.unsqueeze(len(indexes))
            indexes.append(None)
        elif part is Ellipsis:
            left = sum(later is not None for later in keys[at + 1 :])
            indexes += [None] * (tensor.dim() - len(indexes) - left)
        elif isinstance(part, slice):
            tensor = aten.slice(tensor, len(indexes), part.start, part.stop, part.step or 1)
            indexes.append(None)
        elif isinstance(part, Tensor):
            indexes.append(part)
        else:
            tensor = tensor.select(len(indexes), part)
    return tensor, indexes if any(index is not None for index in indexes) else []


class Stream:
    """Replaces torch.cuda.Stream. All streams are one queue."""

    def wait_stream(self, other: Stream) -> None:
        pass


def _as_meta(tree: Any) -> Any:
    return tree_map_only(Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta"), tree)


def _poison(memory: Tensor) -> None:
    """Fill memory, so that reading it too early gives wrong results."""
    if memory.is_floating_point():
        memory.fill_(float("nan"))
    elif memory.dtype is not torch.bool:
        memory.fill_(0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A machine with an H100 that has only 1 GiB of memory."""
    device = Gpu()
    with replaced(monkeypatch, lambda: device), using(device):
        yield device


@contextmanager
def replaced(monkeypatch: pytest.MonkeyPatch, device: Callable[[], Gpu]) -> Iterator[None]:
    """Replace torch.cuda by the functions of ``device()``, which is evaluated in the calling thread."""

    class OwnEvent(Event):  # classes, because other code writes torch.cuda.Event | None
        def __init__(self) -> None:
            super().__init__(device())

    class OwnGraph(Graph):
        def __init__(self) -> None:
            super().__init__(device())

    module_replacement: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=132),
        "mem_get_info": lambda device=None: (1 << 30, 1 << 30),
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "synchronize": lambda asked=None: device().run(),
        "Event": OwnEvent,
        "Stream": Stream,
        "current_stream": Stream,
        "stream": lambda stream: nullcontext(),
        "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": OwnGraph,
        "graph": lambda *args, **options: device().recording(*args, **options),
    }
    for name, stand_in in module_replacement.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    yield


@contextmanager
def using(device: Gpu) -> Iterator[None]:
    """This thread uses ``device`` as its GPU during the block."""
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]  # or torch.tensor would ask the driver
    try:
        with device:
            yield
    finally:
        torch._C._set_only_lift_cpu_tensors(False)  # type: ignore[attr-defined]
