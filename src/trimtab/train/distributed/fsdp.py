"""Fully sharded data parallelism: torch's FSDP2 over all processes, within hosts, or combined with tensor parallelism."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trimtab.core.settings import Settings
from trimtab.core.technique import require
from trimtab.errors import UsageError, WorkloadError
from trimtab.tensors.structure import map_tensors
from trimtab.train.distributed.process_group import Group, broadcast
from trimtab.train.loss.adapter import Weight
from trimtab.train.optim.kernels import use_kernels
from trimtab.train.runtime.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

COMPARED = 16
"""Number of updates in which the processes compare each layer before they gather it. Later updates are compared at their end,
which is too late if a process calls more layers than another: it then waits for the timeout."""
_PRIME, _END = 2**61 - 1, -1
_DIFFERENT = (
    "The processes called different layers of the model in this update, though they must gather the parameters of each at the "
    "same time. Have all of them run the same layers in every update, for example with layerdrop=0, or take "
    "sharding='replicate'."
)


class FsdpGroup(Group):
    """Processes that hold a shard of each parameter, and gather the parameters of a layer while it runs.

    With ``sharding="hybrid"``, parameters are sharded within a host, and gradients are also summed over hosts. With a ``mesh``
    that has an axis ``model``, along which layers were split, parameters are sharded along its axis ``data``.

    All processes must gather together, so an update that runs out of memory ends the run.
    """

    averages = True
    shared = True

    def __init__(self, settings: Settings, mesh: DeviceMesh | None = None) -> None:
        super().__init__(settings, None if mesh is None else mesh.get_group("data"))
        self.averages = mesh is None or self.size > 1
        self.mesh = self._mesh() if mesh is None else mesh["data"]
        self._model: Any = None
        self._compared = 0
        """Number of updates whose layers were compared."""

    def place(self, model: nn.Module, settings: Settings) -> None:
        """Shard every parameter. Units of gathering are the elements of ``nn.ModuleList``, and the rest of the model.

        Units are moved to the device one by one, because the whole model may not fit there.

        Source: Zhao et al. 2023, https://arxiv.org/abs/2304.11277
        """
        kept = (settings.distributed.sharding, settings.distributed.communication, self.mesh)
        if isinstance(within := vars(model).get("forward"), _GatheringForward):
            self._model = within.root
            if self._model.kept != kept:
                raise UsageError(
                    "An earlier Trainer has shared the model out already, with another sharding, communication or mesh. Give "
                    "this one the same, or build the model anew."
                )
            return
        self.compare(model)
        self._refuse_unshardable(model)
        if settings.data.exact_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        fsdp = require("torch.distributed.fsdp")
        kind = settings.distributed.communication
        narrow = {} if kind is None else {"reduce_dtype": getattr(torch, kind)}
        options = {"mesh": self.mesh, "mp_policy": fsdp.MixedPrecisionPolicy(**narrow)}
        done: set[int] = set()
        calls = _LayerCalls()
        root = _Root(model, calls, kept) if self.size > 1 else model  # so that a loss may call any method of the model
        for index, unit in enumerate((*_units(model), root)):
            World.place(self, unit, settings)
            self._broadcast([v for v in (*unit.parameters(), *unit.buffers()) if id(v) not in done])
            if self.size > 1:
                self._model = fsdp.fully_shard(unit, **options)
                if unit is not root:
                    unit.register_forward_pre_hook(calls.hook(index), prepend=True)  # before the hook that gathers
            done.update(map(id, (*unit.parameters(), *unit.buffers())))

    def _refuse_unshardable(self, model: nn.Module) -> None:
        """Refuse a model that FSDP cannot shard, before anything is sharded.

        Raises:
            UsageError: a parameter has no dimension, or the trained parameters of a unit have several dtypes.
        """
        names = {parameter: name for name, parameter in model.named_parameters()} if self.size > 1 else {}
        for parameter, name in names.items():
            if not parameter.dim():
                raise UsageError(
                    f"The parameter {name} is a number without a dimension along which it could be shared out. Make it of "
                    "shape (1,), or take sharding='replicate'."
                )
        for unit in (*_units(model), model):
            own = [parameter for parameter in unit.parameters() if parameter in names and parameter.requires_grad]
            if other := [parameter for parameter in own if parameter.dtype != own[0].dtype]:
                raise UsageError(
                    f"{names[own[0]]} is of {own[0].dtype} and {names[other[0]]} of {other[0].dtype}, but parameters that are "
                    "gathered together must be of one type. Train the model in one, such as model.float() with "
                    "PrecisionSettings(autocast='bfloat16'), or take sharding='replicate'."
                )
            for parameter in unit.parameters():
                names.pop(parameter, None)

    @torch.no_grad()
    def _broadcast(self, values: Sequence[torch.Tensor]) -> None:
        """Give all processes the values of rank 0; a DTensor is broadcast within each group of processes with equal parts."""
        for value in values:
            broadcast(_local(value), self.data if hasattr(value, "to_local") else None)

    def wrap(self, model: nn.Module, settings: Settings, *, fresh: bool) -> nn.Module:
        """Give the processes seeds of their own if the run is ``fresh``; those with equal data get equal seeds."""
        if fresh:
            torch.manual_seed(self.gathered(torch.initial_seed())[0] + self.rank)
        return model

    @contextlib.contextmanager
    def together(self, *, update: bool = False) -> Iterator[None]:
        """A block that succeeds in all processes or in none.

        Raises:
            WorkloadError: in all processes, if they called different layers in an update.
        """
        calls: _LayerCalls | None = None if self._model is None or not update else self._model.calls
        if calls is None:
            with super().together(update=update):
                yield
            return
        calls.begin(self._refuse_different if self._compared < COMPARED else None)
        try:
            with super().together(update=update):
                yield
        finally:
            calls.compare = None
        self._compared += 1
        self._refuse_different(calls.digest)

    def _refuse_different(self, value: int) -> None:
        """Refuse a ``value`` that differs between processes."""
        most, least = self._maximum(value, -value)
        if most != -least:
            raise WorkloadError(_DIFFERENT)

    def exchanging(self, *, now: bool) -> contextlib.AbstractContextManager[object]:
        """A block whose backward pass reduces and scatters gradients if ``now``."""
        if self._model is not None:
            self._model.set_requires_gradient_sync(now)
        return contextlib.nullcontext()

    def forward(self, compute: Callable[[], T]) -> T:
        """Run the forward pass ``compute``, with the parameters gathered that belong to no list of layers."""
        if self._model is None:
            return compute()
        found: T = self._model(compute)
        self._model.calls.add(_END)
        return found

    def forward_alone(self, compute: Callable[[], T]) -> T:
        """Run the forward pass ``compute``. If it fails, the other processes wait within a layer and cannot be informed."""
        try:
            return self.forward(compute)
        except BaseException as error:
            self._reported = self._unreported = error
            raise

    def attach_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Use kernels for one parameter at a time if the parameters lie on different meshes."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(_by_mesh(parameters)) > 1 and any(name in optimizer.defaults for name in ("foreach", "fused")):
            use_kernels(optimizer, "loop")

    def overflow(self, found: torch.Tensor) -> None:
        """Take the maximum over all processes, each of which has seen its own shards."""
        dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm over the gradients of all shards."""
        parts = [torch.nn.utils.get_total_norm(same) for same in _by_mesh(grads)]
        whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
        found: torch.Tensor = torch.linalg.vector_norm(torch.stack(whole))
        return found

    def total(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm, which is equal in all processes; it is not finite if a shard of any process is not."""
        return self.norm(grads)

    def scale(self, grads: Sequence[torch.Tensor], factor: Weight) -> None:
        for grad in grads:
            _local(grad).mul_(factor)

    def free_gathered(self) -> None:
        """Free parameters that a forward pass without a backward pass has gathered."""
        if self._model is not None:
            self._model.reshard()

    def unsharded(self, state: Any) -> Any:
        """``state`` with whole tensors on the CPU in rank 0, and empty tensors in other processes. All must call it."""

        def gathered(tensor: torch.Tensor) -> torch.Tensor:
            found = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            return found.cpu() if self.leads else torch.empty(0)

        return map_tensors(state, gathered)

    def shard(self, value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """This process's shard of a whole tensor, which every process has, sharded as ``like`` is."""
        if not hasattr(like, "full_tensor") or hasattr(value, "full_tensor") or value.shape != like.shape:
            return value
        given: Any = like
        tensor = require("torch.distributed.tensor")
        share = tensor.distribute_tensor(value, given.device_mesh, given.placements, src_data_rank=None)
        found: torch.Tensor = tensor.DTensor.from_local(
            _local(share).clone(),  # a view would keep the memory of the whole
            given.device_mesh,
            given.placements,
            run_check=False,
            shape=share.shape,
            stride=share.stride(),
        )
        return found

    def _mesh(self) -> DeviceMesh:
        mesh = require("torch.distributed.device_mesh").init_device_mesh
        kind = torch.device(self.settings.device).type
        if self.settings.distributed.sharding != "hybrid":
            found: DeviceMesh = mesh(kind, (self.size,), mesh_dim_names=("data",))
            return found
        local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        if not local or self.size % local:
            raise UsageError(
                f"sharding='hybrid' shares within hosts, but LOCAL_WORLD_SIZE is {local or 'not set'} and there are "
                f"{self.size} processes. Start the script with torchrun, with the same number of processes on each host."
            )
        found = mesh(kind, (self.size // local, local), mesh_dim_names=("hosts", "data"))
        return found


class _LayerCalls:
    """The order in which this process calls layers in an update, to be compared with other processes.

    If two processes call different layers, each gathers shards of both. If one calls a layer more, it waits forever.
    """

    def __init__(self) -> None:
        self.digest = 0
        """Hash of all calls since the update began."""
        self.compare: Callable[[int], None] | None = None
        """Called before each layer, to refuse a difference at once."""

    def begin(self, compare: Callable[[int], None] | None) -> None:
        """Begin an update."""
        self.digest, self.compare = 0, compare

    def hook(self, index: int) -> Callable[..., None]:
        """A forward pre-hook for layer ``index``."""
        add = require("torch._dynamo").disable(self.add)  # as FSDP's own hooks are
        return lambda *_: add(index)

    def add(self, index: int) -> None:
        """Record that layer ``index`` runs; recomputation in a backward pass does not count."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.digest = (self.digest * 31 + index + 2) % _PRIME
        if self.compare is not None:
            self.compare(index)


def _units(model: nn.Module) -> list[nn.Module]:
    """The layers that are gathered as a unit: the elements of ``nn.ModuleList``, each once, inner ones first.

    A layer that shares a parameter with a module outside of it is none: the parameter must belong to a unit that has both.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    within = dict.fromkeys(layer for layers in lists for layer in layers)
    holders: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))

    def closed(layer: nn.Module) -> bool:
        inside = set(map(id, layer.modules()))
        return all(holders[id(parameter)] <= inside for parameter in layer.parameters())

    called = [layer for layer in within if not isinstance(layer, (nn.ModuleList, nn.ModuleDict))]
    units = [layer for layer in called if closed(layer)]
    return sorted(units, key=lambda unit: sum(1 for _ in unit.modules()))


class _Root(nn.Module):
    """The root module for FSDP. Its forward pass runs any function, with the parameters of ``model`` gathered.

    Args:
        kept: sharding, communication and mesh of the model.
    """

    def __init__(self, model: nn.Module, calls: _LayerCalls, kept: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self.calls, self.kept, self.inside = model, calls, kept, False
        model.forward = _GatheringForward(self, model.forward)

    def forward(self, compute: Callable[[], T]) -> T:
        """Run ``compute`` and return its result."""
        before, self.inside = self.inside, True
        try:
            return compute()
        finally:
            self.inside = before


class _GatheringForward:
    """The forward pass of a sharded model, which gathers the parameters unless it is called within the root module."""

    def __init__(self, root: _Root, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.root, self._forward = root, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.root.inside:
            return self._forward(*args, **kwargs)
        return self.root(functools.partial(self._forward, *args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> _GatheringForward:
        raise TypeError("a sharded model has only a part of its parameters in each process.")


def _local(value: torch.Tensor) -> torch.Tensor:
    """The local shard of ``value``, detached."""
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found.detach()


def _by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors grouped by mesh; an operation takes tensors of one mesh only."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())
