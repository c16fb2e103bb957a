"""Set up a run before its first update; collect and restore the state that a checkpoint holds."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trimtab._internal.text import listed, of_type
from trimtab._internal.user_code import user_code
from trimtab._internal.validation import refuses
from trimtab.core.settings import Settings
from trimtab.errors import UsageError
from trimtab.tensors.memory_format import to_channels_last
from trimtab.train.checkpoint import registered, resume_conflicts
from trimtab.train.checkpoint.checkpoints import refuse_unsavable
from trimtab.train.data.device_prefetch import Transfer, mover, transfer_for
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.distributed.devices import local_device
from trimtab.train.engine import duration, epoch
from trimtab.train.engine.compiled_step import CompiledStep, CompileWatch
from trimtab.train.engine.manual_step import ManualStep
from trimtab.train.engine.step import Step
from trimtab.train.engine.validation import Move
from trimtab.train.loss import trainable_loss
from trimtab.train.loss.adapter import LossAdapter
from trimtab.train.optim import learning_rates, optimizer_state, schedule_state
from trimtab.train.optim.kernels import move_state, use_kernels
from trimtab.train.optim.optimizer_dict import PAGE, OptimizerDict, kind_of, needs_closure, parameters_for, plateaus
from trimtab.train.run_context import RunContext
from trimtab.train.runtime import state_dict_versions
from trimtab.train.runtime.step_clock import Clock, clock_for
from trimtab.train.runtime.world import World


@dataclasses.dataclass(frozen=True)
class Ready:
    """The parts of a run, once its settings are decided."""

    feed: MicroBatcher
    step: Step
    scheduler: LRScheduler | None
    clock: Clock
    move: Move
    updates: int | None
    """Updates in all, if known."""


def ready(context: RunContext, train: Iterable[Any]) -> Ready:
    """Convert the model as the settings ask, and build the feed, the step and the schedule.

    Raises:
        UsageError: a schedule needs the number of updates, and the loader has no length.
    """
    settings, model = context.settings, context.model
    clock, move = clock_for(context.device), apply_memory_format(model, settings, context.device)
    feed = feed_for(train, settings, clock, move, transfer_for(context.device, move))
    context.world.timed(clock)
    called = context.world.wrap(model, settings, fresh=context.resuming is None and not context.position.update)
    step = step_for(settings, context.objective)(
        called, context.objective, context.optimizer, settings, context.world, clock, context.log_every
    )
    step.hooks = context.hooks or None
    context.scheduler = schedule_state.scheduler_for(context, context.fit.planned)
    context.options = context.options or resume_conflicts.options_of(context.optimizer)
    if context.resuming is not None:
        context.note_once(registered.unregistered_note(context, context.resuming.get("registered", {})))
        _restore_after_setup(context, step, context.resuming)
    elif context.step_state is not None:
        step.load_state_dict(context.step_state)
    if context.resuming is not None or not context.position.update:
        resume_conflicts.apply_override(context, context.scheduler)
    learning_rates.scale_to_batches(context, context.scheduler, duration.batches_per_update(context, train))
    refuse_unsavable_state(context)
    context.note_once(trainable_loss.note(context.optimizer, context.model))
    if settings.optimizer.implementation is not None and settings.optimizer.implementation != "auto":
        use_kernels(context.optimizer, settings.optimizer.implementation)
    made = Ready(feed, step, context.scheduler, clock, move, context.fit.planned)
    if isinstance(made.step, CompiledStep):
        context.watchers.append(CompileWatch(made.step))
    return made


def refuse_unsavable_state(context: RunContext, feed: MicroBatcher | None = None) -> None:
    """Check before the first checkpoint is due that it can hold the state, with ``feed`` also the loader's position.

    Raises:
        UsageError: a checkpoint cannot hold it.
    """
    if context.checkpoints is not None:
        optimizer_state.refuse_incomplete_state(context.optimizer)
        given = {"model": context.model.state_dict(), "optimizer": context.optimizer.state_dict()}
        loss = trainable_loss.state_of(context.objective.module)
        refuse_unsavable(given | {"scheduler": schedule_state.state_of(context.scheduler), "loss": loss})
        refuse_unsavable({"loader": None if feed is None else feed.state()})


def feed_for(
    batches: Iterable[Any], settings: Settings, clock: Clock, move: Move, transfer: Transfer | None = None
) -> MicroBatcher:
    """The ``batches``, accumulated and split as ``settings`` ask."""
    data, exact = settings.data, settings.data.exact_batchnorm
    micro = data.micro_batch if isinstance(data.micro_batch, int) else None
    joined = exact or data.joined
    return MicroBatcher(batches, data.accumulate, clock, move, micro=micro, joined=joined, exact=exact, transfer=transfer)


def apply_memory_format(model: nn.Module, settings: Settings, device: torch.device) -> Move:
    """Give ``model`` the memory format of ``settings``; returns the function that moves batches to ``device`` in it."""
    nhwc = settings.memory_format == "channels_last"
    if nhwc:
        if any(map(is_lazy, model.parameters())):
            raise UsageError("Lazy modules have no memory_format before a forward pass: call the model once before fit().")
        to_channels_last(model)
    return mover(device, channels_last=nhwc)


def step_for(settings: Settings, objective: LossAdapter) -> type[Step]:
    """The class of step that ``settings`` and the loss ask for."""
    if objective.manual:
        return ManualStep
    return CompiledStep if settings.compile is True else Step


def optimizer_for(
    model: nn.Module,
    optimizer: Optimizer | Callable[..., Optimizer] | Mapping[str, Any],
    loss: nn.Module | None = None,
    *,
    processes: int = 1,
) -> Optimizer:
    """The optimizer, made if it is a function, and checked against the model and a ``loss`` that may have parameters.

    Several by name become an :class:`OptimizerDict`; a function gets the parameters of the part with its name.

    Its state is moved to the devices of the parameters.

    Raises:
        UsageError: the model has nothing to train, or the optimizer has other parameters, or needs a closure.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        count = sum(1 for _ in model.parameters())
        reason = f"all its {count} parameters have requires_grad=False" if count else "it has no parameters"
        fix = "Set it to True on those to be trained" if count else "Give one that has some"
        raise UsageError(f"There is nothing to train in {type(model).__name__}: {reason}. {fix}.")
    if isinstance(optimizer, Mapping):
        if not optimizer:
            raise UsageError("optimizer is an empty dict; give at least one optimizer.")
        found = {name: _made(each, functools.partial(parameters_for, name, model)) for name, each in optimizer.items()}
        optimizer = OptimizerDict(found)
    else:
        optimizer = _made(optimizer, lambda: [*trainable, *trainable_loss.trainable(loss, model)])
    own = {id(p) for p in (*model.parameters(), *(() if loss is None else loss.parameters()))}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UsageError(
            f"The optimizer updates {len(foreign)} parameters that are not the model's (the first has shape "
            f"{tuple(foreign[0].shape)}). Make it from model.parameters() of this very model, after its last conversion, or "
            "give a function that makes it: optimizer=lambda parameters: torch.optim.AdamW(parameters)."
        )
    trainable_loss.refuse_several_processes(optimizer, model, processes)
    move_state(optimizer)
    return optimizer


def _made(optimizer: Any, parameters: Callable[[], list[nn.Parameter]]) -> Optimizer:
    """``optimizer``, or what it returns for ``parameters`` if it is a function.

    Raises:
        UsageError: it is neither, or returns something else.
    """
    if isinstance(optimizer, Optimizer):
        return optimizer
    if not callable(optimizer):
        several = isinstance(optimizer, (list, tuple))
        fix = f" Several have names: optimizer={{'generator': ..., 'critic': ...}}. {PAGE}" if several else ""
        raise UsageError(f"optimizer is {of_type(optimizer)}; give one of torch.optim, or a function that makes it.{fix}")
    if error := refuses(optimizer, []):
        raise UsageError(
            f"The optimizer function cannot be called with the parameters: {error}. Give one such as "
            "lambda parameters: torch.optim.AdamW(parameters)."
        )
    with user_code("The optimizer function, called with a list of the parameters, raised"):
        found = optimizer(parameters())
    if not isinstance(found, Optimizer):
        raise UsageError(f"The optimizer function returned {of_type(found)}, not a torch.optim.Optimizer. Let it return one.")
    return found


def check_manual(objective: LossAdapter, settings: Settings, world: World) -> None:
    """Check that the settings suit a loss that makes its own steps, if the loss does.

    Raises:
        UsageError: a setting needs to compute an update twice, or exchanges gradients within its backward pass.
    """
    if not objective.manual:
        return
    exchanged = {
        "distributed.sharding": world.shared and settings.distributed.sharding,
        "distributed.communication": settings.distributed.communication,
        "data.exact_batchnorm": settings.data.exact_batchnorm,
    }
    if world.processes > 1 and world.shared and settings.distributed.sharding == "replicate":
        raise UsageError(
            "loss is a function that drives, and the model is spread over a device mesh, whose processes exchange gradients in "
            f"the backward pass. Give loss(model, batch) and optimizers by name. {PAGE}"
        )
    if world.processes > 1 and (inside := {name: value for name, value in exchanged.items() if value}):
        raise UsageError(
            f"loss is a function that drives, whose gradients {world.processes} processes exchange in run.step, and Settings "
            f"have {_assigned(inside)}, which exchange in the backward pass. Leave that out, or give loss(model, batch) and "
            f"optimizers by name. {PAGE}"
        )
    asked = {name: settings.value(name) for name in settings.names() if settings.value(name) == "auto"}
    given = {"compile": settings.compile, "memory.activation_mb": settings.memory.activation_mb}
    asked |= {name: value for name, value in given.items() if value}
    if asked:
        raise UsageError(
            f"Settings have {_assigned(asked)}, for which an update is computed on copies or again; loss is a function that "
            "drives its own steps, which cannot be repeated. Leave that out. torch.compile(model.part) compiles a part."
        )


def _assigned(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def check_closure(optimizer: Optimizer, settings: Settings) -> None:
    """Check that an optimizer with a closure can run under ``settings``.

    Raises:
        UsageError: float16's loss scale would change within its step, or updates are to be skipped.
    """
    if not needs_closure(optimizer):
        return
    name = kind_of(optimizer)
    if settings.precision.autocast == "float16":
        raise UsageError(
            f"{name} computes the loss several times per update, between which float16's loss scale cannot be checked. Use "
            f"precision.autocast='bfloat16' or leave it out. {PAGE}"
        )
    if (asked := settings.optimizer.nonfinite) in ("skip", "stop"):
        raise UsageError(
            f"{name} changes parameters between its evaluations of the loss, so that its step cannot be left out, as "
            f"optimizer.nonfinite={asked!r} asks. Use 'raise' or 'ignore'. {PAGE}"
        )


def check_device(name: str) -> None:
    """Check the device.

    Raises:
        UsageError: torch cannot create a tensor on it.
    """
    try:
        torch.empty(0, device=local_device(name))  # not on another process's GPU, where it would take memory
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(
            f"Settings device is {name!r}, which cannot be used here: {reason}. Use 'cpu', or mend that."
        ) from error


def loss_on(loss: Any, device: torch.device) -> Any:
    """``loss`` with its tensors, such as class weights, on ``device``."""
    if isinstance(loss, nn.Module):
        return loss.to(device)
    if not isinstance(loss, functools.partial):
        return loss
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in loss.keywords.items()}
    return functools.partial(loss.func, *loss.args, **options)


def check_model(model: Any) -> None:
    """Check the model.

    Raises:
        UsageError: it is no ``torch.nn.Module``.
    """
    if isinstance(model, type):
        raise UsageError(f"model is {model.__name__}, a class, and no model yet. Give what it makes: {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {of_type(model)}; give a torch.nn.Module.")
    for name, module in model.named_modules():
        if type(module).train is not nn.Module.train and not _takes_mode(module.train):
            where = f" (model.{name})" if name else ""
            raise UsageError(
                f"{type(module).__name__}.train{where} is a method of its own, train{inspect.signature(module.train)}, and "
                "torch calls train(mode) to switch a module to training mode and back. Give the method another name, "
                "such as fit."
            )


def _takes_mode(train: Callable[..., Any]) -> bool:
    """Whether the method ``train`` of a module takes a mode, as torch's does."""
    try:
        first = next(iter(inspect.signature(train).parameters.values()), None)
    except ValueError:  # builtins have no signature
        return True
    if first is None or refuses(train, True):
        return False
    return (
        "mode" in first.name or "train" in first.name or isinstance(first.default, bool) or first.annotation in (bool, "bool")
    )


def check_place(model: nn.Module, device: torch.device) -> None:
    """Check that the model is not moved from an accelerator to another kind of device.

    Raises:
        UsageError: it is on an accelerator, and ``device`` is another kind.
    """
    for parameter in model.parameters():
        if (there := parameter.device.type) not in ("cpu", "meta", device.type):
            raise UsageError(
                f"The model is on {there}, and Settings device is {device.type!r}, where it would be trained. Give "
                f"Settings(device={there!r}), or move the model first: model.to({device.type!r})."
            )


def state_of(context: RunContext, ready: Ready) -> dict[str, Any]:
    """Everything that the next update depends on; all processes must call it together."""
    world = context.world
    return {
        "model": world.unsharded(context.model.state_dict()),
        "versions": state_dict_versions.versions(context.model.state_dict()),
        "optimizer": world.unsharded(context.optimizer.state_dict()),
        "scheduler": schedule_state.state_of(ready.scheduler),
        "schedule_kind": schedule_state.kind_of(ready.scheduler),
        "schedule_begun": context.schedule_begun,
        "planned": ready.updates,
        "step": ready.step.state_dict(),
        "ema": None if context.ema is None else world.unsharded(context.ema.shadow),
        "ema_updates": None if context.ema is None else context.ema.updates,
        "best": world.unsharded(context.best_parameters),
        "loss": world.unsharded(trainable_loss.state_of(context.objective.module)),
        "registered": registered.state_of(context),
        "position": dataclasses.asdict(context.position),
        "results": context.results,
        "taken": world.gathered(context.position.batch),  # processes with unequal shares differ
        "batches": duration.total_batches(ready.feed.batches, world),
        "random": world.gathered(epoch.random_of(context, ready.feed.batches)),
        "epoch_random": world.gathered(context.epoch_random),
        "loader": world.gathered(epoch.position_of_loader(context, ready.feed)),
        "processes": world.size,
        "seed": world.seed,
        "decided": context.decided,
        "modes": context.modes.state_of(),
        "kind": type(context.model).__qualname__,
        "optimizer_kind": kind_of(context.optimizer),
        **resume_conflicts.state_of(context),
    }


def average_buffers(context: RunContext) -> None:
    """Give all processes the same buffers, in the model and in its moving average; all must call it together."""
    average = [] if context.ema is None else context.ema.buffers(context.model)
    context.world.average_buffers([*context.model.buffers(), *average])


def restore(context: RunContext, state: Mapping[str, Any]) -> None:
    """Restore model, optimizer groups, averages and position from a checkpoint; :func:`ready` restores the rest.

    Raises:
        UsageError: the checkpoint is of another model or optimizer; nothing was changed.
    """
    assert context.checkpoints is not None
    folder, now = context.checkpoints.folder, context.model.state_dict()
    differing = list(now.keys() ^ state["model"].keys())
    differing += [n for n in now.keys() & state["model"].keys() if _reshaped(now[n], state["model"][n])]
    if differing:
        shown = listed(sorted(differing))
        raise UsageError(
            f"The checkpoint in {folder} is of another model, a {state['kind']}: {shown} differ from this "
            f"{type(context.model).__qualname__}. Give the model that it was made with, or another folder."
        )
    if (kind := kind_of(context.optimizer)) != state["optimizer_kind"]:
        raise UsageError(
            f"The checkpoint in {folder} was made with {state['optimizer_kind']}, not {kind}. Give that optimizer."
        )
    missing = resume_conflicts.missing_groups(context, state)
    was = list(map(len, state["names"]))
    are = [len(group["params"]) for group in (*context.optimizer.param_groups, *missing)]
    if was != are:
        raise UsageError(
            f"The checkpoint in {folder} was made with optimizer groups of {_listed(was)} parameters, not of {_listed(are)}. "
            "Give the optimizer the groups that it had."
        )
    if (context.ema is None) != (state["ema"] is None):
        raise UsageError(f"The checkpoint in {folder} was made with{'' if state['ema'] else 'out'} ema=...; give the same.")
    world = context.world
    for group in missing:
        context.optimizer.add_param_group(group)
    resume_conflicts.restore_flags(context, state)
    context.model.load_state_dict(_shards_of(state["model"], now, state, world))
    context.note_once(trainable_loss.restore(context.objective.module, state.get("loss", {})))
    world.seed = state["seed"]
    if context.ema is not None:
        context.ema.load(context.model, state["ema"], state["ema_updates"], world.shard)
    best = state["best"]
    context.best_parameters = None if best is None else _shards_of(best, now, state, world)
    vars(context.position).update(state["position"])
    context.results = dict(state["results"])
    resume_conflicts.restore_best(context, state)
    registered.restore(context, state.get("registered", {}))
    if len(taken := state.get("taken", ())) == world.processes:
        context.position.batch = taken[world.index]
    _convert_position(context, state["processes"])
    _restore_decisions(context, state.get("decided", {}))


def _shards_of(values: Mapping[str, Any], now: Mapping[str, Any], state: Mapping[str, Any], world: World) -> dict[str, Any]:
    """This process's part of the checkpoint's ``values``; ``now`` is the model's state dict."""
    parts = {name: world.shard(value, now[name]) for name, value in values.items()}
    return state_dict_versions.versioned(parts, state["versions"])


def _convert_position(context: RunContext, before: int) -> None:
    """Convert the position in the epoch, in batches per process, from ``before`` processes to the present number."""
    position, now = context.position, context.world.size
    if before == now or not position.batch:
        return
    done = position.batch * before
    position.batch, position.begun_by = done // now, position.begun_by or before
    text = f"Processes: {before} before, {now} now. The epoch goes on after batch {position.batch} of each."
    if done % now:
        text += f" {done % now} of the {done} batches that it had used come again, because they do not share out evenly."
    if 1 in (before, now):
        text += " A DataLoader that shuffles has another order alone than shared out; trimtab.train.Loader has the same one."
    context.note(text)


def _reshaped(now: Any, kept: Any) -> bool:
    """Whether two tensors differ in shape. Lazy parameters have none yet, and a module's extra state may be no tensor."""
    return isinstance(now, torch.Tensor) and isinstance(kept, torch.Tensor) and not is_lazy(now) and now.shape != kept.shape


def _listed(counts: list[int]) -> str:
    return " and ".join(map(str, counts))


def _restore_decisions(context: RunContext, decided: Mapping[str, Any]) -> None:
    """Replace ``"auto"`` by the checkpoint's choices: other choices would give other losses."""
    compiles = context.settings.compile == "auto"
    again = {
        name: value
        for name, value in decided.items()
        if context.settings.value(name) == "auto" or (compiles and name.startswith("compiler."))
    }
    context.settings = context.settings.replaced(again)
    context.decided = dict(decided)
    if again:
        context.note(f"{_assigned(again)}: as decided when the run began.")


def _restore_after_setup(context: RunContext, step: Step, state: Mapping[str, Any]) -> None:
    """Restore optimizer state, step and schedule from a checkpoint.

    Raises:
        UsageError: the schedule is of another kind than the checkpoint's.
    """
    kept, named = state["model"], context.model.named_parameters()
    before: dict[torch.Tensor, torch.dtype] = {parameter: kept[name].dtype for name, parameter in named if name in kept}
    # After the scheduler was made, because making one changes the learning rates.
    optimizer_state.load(context.optimizer, state["optimizer"], context.world, before)
    step.load_state_dict(state["step"])
    scheduler, script = context.scheduler, context.options or []
    found = schedule_state.restore(context, state)
    context.options = state["given"]
    skipped = {*context.override, *(() if context.scheduler is scheduler else resume_conflicts.SCHEDULED_ENTRIES)}
    options = list(resume_conflicts.differences(state["given"], script, skipped))
    if found := [*found, *options]:
        fix = (
            "resume(override={'lr': ...}) overrides numbers of the optimizer." if options else "Only a new run can change that."
        )
        context.note_once(f"The checkpoint wins over the script: {', '.join(found)}. {fix}")
    for note in context.modes.restore(state["modes"]):
        context.note_once(note)
    if resume_conflicts.watches_other_metric(context, state):
        for plateau in plateaus(context.scheduler):  # its best value is of another figure
            plateau.best, plateau.num_bad_epochs, plateau.cooldown_counter = plateau.mode_worse, 0, 0
