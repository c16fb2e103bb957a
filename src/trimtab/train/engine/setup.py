"""What happens before the first update of a run, and what a checkpoint holds."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from trimtab._internal.text import of_type
from trimtab._internal.validation import refuses
from trimtab.core.settings import Settings
from trimtab.core.workload import user_code
from trimtab.errors import UsageError
from trimtab.tensors.memory_format import lay_out
from trimtab.train.checkpoint import resume_conflicts as given
from trimtab.train.checkpoint.checkpoints import refuse_strange
from trimtab.train.data.device_prefetch import Transfer, mover, transfer_for
from trimtab.train.data.micro_batches import MicroBatcher
from trimtab.train.distributed.devices import local_device
from trimtab.train.engine import duration, epoch
from trimtab.train.engine.compiled_step import CompiledStep, CompileWatch
from trimtab.train.engine.step import Step
from trimtab.train.engine.validation import Move
from trimtab.train.loss import trainable_loss
from trimtab.train.optim import learning_rates, optimizer_state, schedule_state
from trimtab.train.optim.kernels import bring_state, use_kernels
from trimtab.train.run_context import RunContext
from trimtab.train.runtime import state_dict_versions
from trimtab.train.runtime.step_clock import Clock, clock_for
from trimtab.train.runtime.world import World


@dataclasses.dataclass(frozen=True)
class Ready:
    """Everything that a run is made of, once its settings are decided."""

    feed: MicroBatcher
    step: Step
    scheduler: LRScheduler | None
    clock: Clock
    move: Move
    updates: int | None
    """How many there will be in all, where that is known."""


def ready(context: RunContext, train: Iterable[Any]) -> Ready:
    """Put the model in the form that the settings ask for, and build the feed, the step and the schedule.

    Raises:
        UsageError: a schedule needs to know how long the run is, and the loader cannot say.
    """
    settings, model = context.settings, context.model
    clock, move = clock_for(context.device), laid_out(model, settings, context.device)
    feed = feed_for(train, settings, clock, move, transfer_for(context.device, move))
    context.world.timed(clock)
    called = context.world.wrap(model, settings, fresh=context.resuming is None and not context.position.update)
    step = step_for(settings)(called, context.objective, context.optimizer, settings, context.world, clock, context.log_every)
    scheduler = context.scheduler = schedule_state.scheduler_for(context, context.fit.planned)
    context.options = context.options or given.options_of(context.optimizer)
    if context.resuming is not None:
        scheduler = context.scheduler = _load_rest(context, step, scheduler, context.resuming)
    elif context.step_state is not None:
        step.load_state_dict(context.step_state)
    if context.resuming is not None or not context.position.update:
        given.put_override(context, scheduler)
    learning_rates.fit_batches(context, scheduler)
    refuse_unkept(context)
    context.note_once(trainable_loss.note(context.optimizer, context.model))
    if settings.optimizer.implementation is not None and settings.optimizer.implementation != "auto":
        use_kernels(context.optimizer, settings.optimizer.implementation)
    made = Ready(feed, step, scheduler, clock, move, context.fit.planned)
    if isinstance(made.step, CompiledStep):
        context.watchers.append(CompileWatch(made.step))
    return made


def refuse_unkept(context: RunContext, feed: MicroBatcher | None = None) -> None:
    """Refuse what no checkpoint could hold now, and not after an epoch; with a ``feed`` that has begun, its position too.

    Raises:
        UsageError: there is such a thing.
    """
    if context.checkpoints is not None:
        optimizer_state.refuse_left_out(context.optimizer)
        given = {"model": context.model.state_dict(), "optimizer": context.optimizer.state_dict()}
        loss = trainable_loss.state_of(context.objective.module)
        refuse_strange(given | {"scheduler": schedule_state.state_of(context.scheduler), "loss": loss})
        refuse_strange({"loader": None if feed is None else feed.state()})


def feed_for(
    batches: Iterable[Any], settings: Settings, clock: Clock, move: Move, transfer: Transfer | None = None
) -> MicroBatcher:
    """The ``batches`` in the groups and parts that ``settings`` ask for."""
    data, exact = settings.data, settings.data.exact_batchnorm
    micro = data.micro_batch if isinstance(data.micro_batch, int) else None
    joined = exact or data.joined
    return MicroBatcher(batches, data.accumulate, clock, move, micro=micro, joined=joined, exact=exact, transfer=transfer)


def laid_out(model: nn.Module, settings: Settings, device: torch.device) -> Move:
    """Give ``model`` the memory format of ``settings``; returns what puts batches on ``device`` in the same."""
    nhwc = settings.memory_format == "channels_last"
    if nhwc:
        if any(map(is_lazy, model.parameters())):
            raise UsageError("Lazy modules have no memory_format before a forward pass: call the model once before fit().")
        lay_out(model)
    return mover(device, channels_last=nhwc)


def step_for(settings: Settings) -> type[Step]:
    """The kind of step that ``settings`` ask for."""
    return CompiledStep if settings.compile is True else Step


def optimizer_for(
    model: nn.Module, optimizer: Optimizer | Callable[..., Optimizer], loss: nn.Module | None = None, *, processes: int = 1
) -> Optimizer:
    """The optimizer, made if it is a function, and checked against the model and a ``loss`` that may have parameters too.

    What state it has goes where the model is.

    Raises:
        UsageError: the model has nothing to train, or the optimizer is over other parameters, or calls the model itself.
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    if not trainable:
        count = sum(1 for _ in model.parameters())
        reason = f"all its {count} parameters have requires_grad=False" if count else "it has no parameters"
        fix = "Set it to True on those to be trained" if count else "Give one that has some"
        raise UsageError(f"There is nothing to train in {type(model).__name__}: {reason}. {fix}.")
    if not isinstance(optimizer, Optimizer):
        if not callable(optimizer):
            several = isinstance(optimizer, (list, tuple))
            fix = " Several are one whose step() makes theirs, and whose param_groups are theirs." if several else ""
            raise UsageError(f"optimizer is {of_type(optimizer)}; give one of torch.optim, or a function that makes it.{fix}")
        if error := refuses(optimizer, []):
            raise UsageError(
                f"The optimizer function cannot be called with the parameters: {error}. Give one such as "
                "lambda parameters: torch.optim.AdamW(parameters)."
            )
        with user_code("The optimizer function, called with a list of the parameters, raised"):
            optimizer = optimizer([*trainable, *trainable_loss.trainable(loss, model)])
        if not isinstance(optimizer, Optimizer):
            raise UsageError(
                f"The optimizer function returned {of_type(optimizer)}, not a torch.optim.Optimizer. Let it return one."
            )
    optimizer_state.refuse_closure(optimizer)
    own = {id(p) for p in (*model.parameters(), *(() if loss is None else loss.parameters()))}
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
    if foreign:
        raise UsageError(
            f"The optimizer updates {len(foreign)} parameters that are not the model's (the first has shape "
            f"{tuple(foreign[0].shape)}). Make it from model.parameters() of this very model, after its last conversion, or "
            "give a function that makes it: optimizer=lambda parameters: torch.optim.AdamW(parameters)."
        )
    trainable_loss.refuse_several_processes(optimizer, model, processes)
    bring_state(optimizer)
    return optimizer


def check_device(name: str) -> None:
    """Refuse a device that is not there.

    Raises:
        UsageError: torch cannot put a tensor on it.
    """
    try:
        torch.empty(0, device=local_device(name))  # what is made on another process's GPU takes memory there
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0].rstrip(".")
        raise UsageError(
            f"Settings device is {name!r}, which cannot be used here: {reason}. Use 'cpu', or mend that."
        ) from error


def loss_on(loss: Any, device: torch.device) -> Any:
    """``loss`` with the tensors of its own, such as the weights of classes, on ``device``."""
    if isinstance(loss, nn.Module):
        return loss.to(device)
    if not isinstance(loss, functools.partial):
        return loss
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in loss.keywords.items()}
    return functools.partial(loss.func, *loss.args, **options)


def check_model(model: Any) -> None:
    """Refuse what is no model.

    Raises:
        UsageError: it is none of torch's modules.
    """
    if isinstance(model, type):
        raise UsageError(f"model is {model.__name__}, a class, and no model yet. Give what it makes: {model.__name__}(...).")
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is {of_type(model)}; give a torch.nn.Module.")


def check_place(model: nn.Module, device: torch.device) -> None:
    """Refuse to train on ``device`` what its owner has put on a faster one.

    Raises:
        UsageError: the model would have to leave an accelerator.
    """
    for parameter in model.parameters():
        if (there := parameter.device.type) not in ("cpu", "meta", device.type):
            raise UsageError(
                f"The model is on {there}, and Settings device is {device.type!r}, where it would be trained. Give "
                f"Settings(device={there!r}), or move the model first: model.to({device.type!r})."
            )


def state_of(context: RunContext, ready: Ready) -> dict[str, Any]:
    """Everything that the next update depends on; of several processes, all must ask for it."""
    world = context.world
    return {
        "model": world.whole(context.model.state_dict()),
        "versions": state_dict_versions.versions(context.model.state_dict()),
        "optimizer": world.whole(context.optimizer.state_dict()),
        "scheduler": schedule_state.state_of(ready.scheduler),
        "schedule_begun": schedule_state.begun(ready.scheduler),
        "planned": ready.updates,
        "step": ready.step.state_dict(),
        "ema": None if context.ema is None else world.whole(context.ema.shadow),
        "ema_updates": None if context.ema is None else context.ema.updates,
        "best": world.whole(context.best_parameters),
        "loss": world.whole(trainable_loss.state_of(context.objective.module)),
        "position": dataclasses.asdict(context.position),
        "results": context.results,
        "taken": world.gathered(context.position.batch),  # which of unequal shares are not as many
        "batches": duration.batches_in_all(ready.feed.batches, world),
        "random": world.gathered(epoch.random_of(context, ready.feed.batches)),
        "epoch_random": world.gathered(context.epoch_random),
        "loader": world.gathered(epoch.place_of(context, ready.feed)),
        "processes": world.size,
        "seed": world.seed,
        "decided": context.decided,
        "modes": context.modes.state_of(),
        "kind": type(context.model).__qualname__,
        "optimizer_kind": type(context.optimizer).__qualname__,
        **given.state_of(context),
    }


def settle(context: RunContext) -> None:
    """Give all processes the same buffers, in the model and in the average of it; all must ask for it."""
    average = [] if context.ema is None else context.ema.buffers(context.model)
    context.world.settle([*context.model.buffers(), *average])


def restore(context: RunContext, state: Mapping[str, Any]) -> None:
    """Put a checkpoint into a trainer: model, optimizer, averages and position; the rest follows when it runs.

    Raises:
        UsageError: the checkpoint is of another model or optimizer; nothing was changed.
    """
    assert context.checkpoints is not None
    folder, now = context.checkpoints.folder, context.model.state_dict()
    differing = list(now.keys() ^ state["model"].keys())
    differing += [n for n in now.keys() & state["model"].keys() if _reshaped(now[n], state["model"][n])]
    if differing:
        shown = ", ".join(sorted(differing)[:3]) + (f" and {len(differing) - 3} more" if len(differing) > 3 else "")
        raise UsageError(
            f"The checkpoint in {folder} is of another model, a {state['kind']}: {shown} differ from this "
            f"{type(context.model).__qualname__}. Give the model that it was made with, or another folder."
        )
    if (kind := type(context.optimizer).__qualname__) != state["optimizer_kind"]:
        raise UsageError(
            f"The checkpoint in {folder} was made with {state['optimizer_kind']}, not {kind}. Give that optimizer."
        )
    missing = given.missing_groups(context, state)
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
    given.restore_flags(context, state)
    context.model.load_state_dict(_of_model(state["model"], now, state, world))
    context.note_once(trainable_loss.restore(context.objective.module, state.get("loss", {})))
    world.seed = state["seed"]
    if context.ema is not None:
        context.ema.load(context.model, state["ema"], state["ema_updates"], world.part)
    best = state["best"]
    context.best_parameters = None if best is None else _of_model(best, now, state, world)
    vars(context.position).update(state["position"])
    context.results = dict(state["results"])
    given.restore_best(context, state)
    if len(taken := state.get("taken", ())) == world.processes:
        context.position.batch = taken[world.index]
    _share_anew(context, state["processes"])
    _redecide(context, state.get("decided", {}))


def _of_model(values: Mapping[str, Any], now: Mapping[str, Any], state: Mapping[str, Any], world: World) -> dict[str, Any]:
    """This process's part of ``values``, which a checkpoint has for what the model has ``now``."""
    parts = {name: world.part(value, now[name]) for name, value in values.items()}
    return state_dict_versions.versioned(parts, state["versions"])


def _share_anew(context: RunContext, before: int) -> None:
    """Count the batches of the epoch that are done, which each of ``before`` processes had, in those of each process now."""
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
    """Whether two tensors differ in shape, if there is one yet; what a module keeps as its extra state need not be a tensor."""
    return isinstance(now, torch.Tensor) and isinstance(kept, torch.Tensor) and not is_lazy(now) and now.shape != kept.shape


def _listed(counts: list[int]) -> str:
    return " and ".join(map(str, counts))


def _redecide(context: RunContext, decided: Mapping[str, Any]) -> None:
    """Settings that were ``"auto"`` are what they were before the interruption, because others would give other losses."""
    again = {name: value for name, value in decided.items() if context.settings.value(name) == "auto"}
    context.settings = context.settings.replaced(again)
    context.decided = dict(decided)
    if again:
        shown = ", ".join(f"{name}={value!r}" for name, value in again.items())
        context.note(f"{shown}: as decided when the run began.")


def _load_rest(context: RunContext, step: Step, scheduler: LRScheduler | None, state: Mapping[str, Any]) -> LRScheduler | None:
    """Put what a run makes anew where it stood in the checkpoint; returns the schedule, for as many updates as it has now.

    Raises:
        UsageError: the schedule is of another kind than the checkpoint's, or has another length and other options too.
    """
    kept, named, planned = state["model"], context.model.named_parameters(), context.fit.planned
    before: dict[torch.Tensor, torch.dtype] = {parameter: kept[name].dtype for name, parameter in named if name in kept}
    # Not before, because making a scheduler changes the learning rates.
    optimizer_state.load(context.optimizer, state["optimizer"], context.world, before)
    step.load_state_dict(state["step"])
    told = [(True, text) for text in schedule_state.load(scheduler, state["scheduler"], state["schedule_begun"])]
    script, context.options = context.options or [], state["given"]
    told += given.differences(state["given"], script, context.override)
    for text in (*(text for _, text in told), *context.modes.restore(state["modes"])):
        context.note_once(text)
    schedule = context.schedule
    if isinstance(scheduler, ReduceLROnPlateau):
        if given.watches_another(context, state):  # its best is of that figure
            scheduler.best, scheduler.num_bad_epochs, scheduler.cooldown_counter = scheduler.mode_worse, 0, 0
    elif scheduler is not None and callable(schedule) and planned is not None and planned != state["planned"]:
        if both := next((text for own, text in told if own), None):
            raise UsageError(
                f"The run has {planned} updates now, and had {state['planned']}: its schedule fits another number only with "
                f"the options that it had. {both} Give those, and lengths that follow the updates it is made for."
            )
        return schedule_state.fitted(context, schedule, scheduler, planned)
    return scheduler
