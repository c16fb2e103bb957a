"""Every process holds a share of each parameter: torch's FSDP2, alone, within hosts, or beside split layers."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from trimtab.core.settings import Settings
from trimtab.core.technique import require
from trimtab.errors import UsageError, WorkloadError
from trimtab.train.distributed.process_group import Group, hand_out
from trimtab.train.loss.adapter import Weight
from trimtab.train.optim.kernels import use_kernels
from trimtab.train.runtime.world import World

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")

COMPARED = 16
"""Updates in which the processes compare each layer before they gather it. Later ones are compared once all has run, which is
too late where a process calls more layers than another: it then waits."""
_PRIME, _END = 2**61 - 1, -1
_DIFFERENT = (
    "The processes called different layers of the model in this update, though they must gather the parameters of each at the "
    "same time. Have all of them run the same layers in every update, for example with layerdrop=0, or take "
    "sharding='replicate'."
)


class FsdpGroup(Group):
    """Processes that hold a share of the model each, and gather a layer's parameters while it runs.

    With ``sharding="hybrid"`` the shares are within a host, whose processes are close to each other, and gradients are added up
    between hosts. With a ``mesh`` that has an axis ``model``, whose layers were split along it, the shares are along its axis
    ``data``.

    All processes must gather at the same time, so an update that runs out of memory ends the run.
    """

    averages = True
    shared = True

    def __init__(self, settings: Settings, mesh: DeviceMesh | None = None) -> None:
        super().__init__(settings, None if mesh is None else mesh.get_group("data"))
        self.averages = mesh is None or self.size > 1
        self.mesh = self._mesh() if mesh is None else mesh["data"]
        self._model: Any = None
        self._compared = 0
        """Updates whose layers were compared one by one."""

    def place(self, model: nn.Module, settings: Settings) -> None:
        """Leave of every parameter this process's share; the units are the elements of lists of layers, and what is left.

        They come to the device one by one, because the whole model need not fit there.

        Source: Zhao et al. 2023, https://arxiv.org/abs/2304.11277
        """
        kept = (settings.distributed.sharding, settings.distributed.communication, self.mesh)
        if isinstance(within := vars(model).get("forward"), _Within):
            self._model = within.root
            if self._model.kept != kept:
                raise UsageError(
                    "An earlier Trainer has shared the model out already, with another sharding, communication or mesh. Give "
                    "this one the same, or build the model anew."
                )
            return
        self.compare(model)
        self._refuse_odd(model)
        if settings.data.exact_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]
        fsdp = require("torch.distributed.fsdp")
        kind = settings.distributed.communication
        narrow = {} if kind is None else {"reduce_dtype": getattr(torch, kind)}
        options = {"mesh": self.mesh, "mp_policy": fsdp.MixedPrecisionPolicy(**narrow)}
        done: set[int] = set()
        calls = _Calls()
        root = _Root(model, calls, kept) if self.size > 1 else model  # so that a loss may call any method of the model
        for index, unit in enumerate((*_units(model), root)):
            World.place(self, unit, settings)
            self._begin_alike([v for v in (*unit.parameters(), *unit.buffers()) if id(v) not in done])
            if self.size > 1:
                self._model = fsdp.fully_shard(unit, **options)
                if unit is not root:
                    unit.register_forward_pre_hook(calls.hook(index), prepend=True)  # before that which gathers
            done.update(map(id, (*unit.parameters(), *unit.buffers())))

    def _refuse_odd(self, model: nn.Module) -> None:
        """Refuse what cannot be shared out, before anything is.

        Raises:
            UsageError: a parameter is a single number without a dimension, or those of one unit are of several types.
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
    def _begin_alike(self, values: Sequence[torch.Tensor]) -> None:
        """Give all processes what the first has; of what was split between some, those with the same part what theirs has."""
        for value in values:
            hand_out(_local(value), self.data if hasattr(value, "to_local") else None)

    def wrap(self, model: nn.Module, settings: Settings, *, fresh: bool) -> nn.Module:
        """The model as it is; the processes draw random numbers of their own."""
        if fresh:
            torch.manual_seed(self.gathered(torch.initial_seed())[0] + self.rank)  # those with the same data draw the same
        return model

    @contextlib.contextmanager
    def together(self, *, update: bool = False) -> Iterator[None]:
        """A block that succeeds in all processes or in none; in that of an update all must call the same layers.

        Raises:
            WorkloadError: they did not; all processes say so.
        """
        calls: _Calls | None = None if self._model is None or not update else self._model.calls
        if calls is None:
            with super().together(update=update):
                yield
            return
        calls.begin(self._alike if self._compared < COMPARED else None)
        try:
            with super().together(update=update):
                yield
        finally:
            calls.compare = None
        self._compared += 1
        self._alike(calls.digest)

    def _alike(self, value: int) -> None:
        """See that all processes give the same."""
        most, least = self._most(value, -value)
        if most != -least:
            raise WorkloadError(_DIFFERENT)

    def exchanging(self, *, now: bool) -> contextlib.AbstractContextManager[object]:
        """A block whose backward pass scatters gradients only if ``now``."""
        if self._model is not None:
            self._model.set_requires_gradient_sync(now)
        return contextlib.nullcontext()

    def asked(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives, with the parameters of the whole model at hand that are in no list of layers."""
        if self._model is None:
            return ask()
        found: T = self._model(ask)
        self._model.calls.add(_END)
        return found

    def looked(self, ask: Callable[[], T]) -> T:
        """The same. Where it fails, the others wait within a layer, where nobody can tell them."""
        try:
            return self.asked(ask)
        except BaseException as error:
            self._told = self._unheard = error
            raise

    def meet(self, optimizer: torch.optim.Optimizer) -> None:
        """Take kernels that work on one parameter after the other where not all are spread over the same processes."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if len(_by_mesh(parameters)) > 1 and any(name in optimizer.defaults for name in ("foreach", "fused")):
            use_kernels(optimizer, "loop")

    def overflow(self, found: torch.Tensor) -> None:
        """Each process has seen its own parts only."""
        dist.all_reduce(found, op=dist.ReduceOp.MAX)

    def norm(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """The norm over all parameters, whole or not."""
        parts = [torch.nn.utils.get_total_norm(same) for same in _by_mesh(grads)]
        whole = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in parts]
        found: torch.Tensor = torch.linalg.vector_norm(torch.stack(whole))
        return found

    def total(self, grads: Sequence[torch.Tensor]) -> torch.Tensor:
        """Their norm: every process has to learn of what is not finite in the part of another."""
        return self.norm(grads)

    def scale(self, grads: Sequence[torch.Tensor], factor: Weight) -> None:
        """Multiply the gradients by ``factor``, in place."""
        for grad in grads:
            _local(grad).mul_(factor)

    def rest(self) -> None:
        """Have the model hold this process's shares again, where it would keep the whole for a backward pass."""
        if self._model is not None:
            self._model.reshard()

    def whole(self, state: Any) -> Any:
        """``state`` with whole tensors, on the CPU of the process that leads; the others take part, and get nothing of them."""
        if isinstance(state, torch.Tensor):
            found = state.full_tensor() if hasattr(state, "full_tensor") else state
            return found.cpu() if self.leads else torch.empty(0)
        if isinstance(state, Mapping):
            return {key: self.whole(value) for key, value in state.items()}
        if isinstance(state, (list, tuple)):
            return type(state)(self.whole(value) for value in state)
        return state

    def part(self, value: torch.Tensor, of: torch.Tensor) -> torch.Tensor:
        """This process's share of a whole tensor, which every process has read."""
        if not hasattr(of, "full_tensor") or hasattr(value, "full_tensor") or value.shape != of.shape:
            return value
        given: Any = of
        tensor = require("torch.distributed.tensor")
        share = tensor.distribute_tensor(value, given.device_mesh, given.placements, src_data_rank=None)
        found: torch.Tensor = tensor.DTensor.from_local(
            _local(share).clone(),  # which else keeps the memory of the whole
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


class _Calls:
    """Which layers this process calls in an update, and in which order: the others must gather the same at the same time.

    Where one calls another layer, what it gathers are parts of two, and where it calls one more, it waits without end.
    """

    def __init__(self) -> None:
        self.digest = 0
        """Of all calls since the update began."""
        self.compare: Callable[[int], None] | None = None
        """Sees that all processes call the same layer now."""

    def begin(self, compare: Callable[[int], None] | None) -> None:
        """An update begins."""
        self.digest, self.compare = 0, compare

    def hook(self, index: int) -> Callable[..., None]:
        """What a layer calls before it runs."""
        add = require("torch._dynamo").disable(self.add)  # as FSDP's own hooks are, beside which it runs
        return lambda *_: add(index)

    def add(self, index: int) -> None:
        """Layer ``index`` is about to run, and not only again for the backward pass."""
        if torch._C._current_graph_task_id() != -1:
            return
        self.digest = (self.digest * 31 + index + 2) % _PRIME
        if self.compare is not None:
            self.compare(index)


def _units(model: nn.Module) -> list[nn.Module]:
    """What is gathered as one: the elements of lists of layers, each once; one that is within another comes first.

    Not so a layer that has a parameter in common with what is outside of it: shared out apart from the other, each would become
    one of its own. It belongs to the unit that holds both.
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
    """What FSDP takes for the whole: its forward pass is whatever is asked for, and so is one of ``model`` by itself.

    Args:
        kept: how the model is shared out.
    """

    def __init__(self, model: nn.Module, calls: _Calls, kept: tuple[Any, ...]) -> None:
        super().__init__()
        self.model, self.calls, self.kept, self.inside = model, calls, kept, False
        model.forward = _Within(self, model.forward)

    def forward(self, ask: Callable[[], T]) -> T:
        """What ``ask`` gives."""
        before, self.inside = self.inside, True
        try:
            return ask()
        finally:
            self.inside = before


class _Within:
    """The forward pass of a sharded model; who calls the model has the parameters gathered."""

    def __init__(self, root: _Root, forward: Callable[..., Any]) -> None:
        functools.update_wrapper(self, forward)
        self.root, self._forward = root, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.root.inside:
            return self._forward(*args, **kwargs)
        return self.root(functools.partial(self._forward, *args, **kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> _Within:
        raise TypeError("a sharded model has only a part of its parameters in each process.")


def _local(value: torch.Tensor) -> torch.Tensor:
    """What this process holds of ``value``."""
    found: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return found.detach()


def _by_mesh(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in lists of those that are shared out over the same processes; only such may meet in one operation."""
    found: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        found.setdefault(getattr(tensor, "device_mesh", None), []).append(tensor)
    return list(found.values())
