"""The loop of a run: epochs of updates, with validations and checkpoints between them."""

from __future__ import annotations

from collections.abc import Generator, Iterable

from trimtab.train.autotune import online_tuning
from trimtab.train.data.peek import preserved_random_state
from trimtab.train.distributed import consistency
from trimtab.train.engine import bounds, checkpoint_policy, duration, epoch, setup, validation, validation_policy
from trimtab.train.engine.step import Run, Update
from trimtab.train.loss.adapter import Batch
from trimtab.train.optim import schedules
from trimtab.train.optim.optimizer_dict import plateaus
from trimtab.train.run_context import RunContext
from trimtab.train.runtime import state_dict_versions
from trimtab.train.telemetry.events import Ended, EpochEnded, EpochStarted, Validated
from trimtab.train.telemetry.log import means
from trimtab.train.telemetry.meter import Meter
from trimtab.train.telemetry.summary import Summary


def updates(
    context: RunContext, train: Iterable[Batch], held_out: Iterable[Batch] | None, epochs: int | None, steps: int | None
) -> Generator[Update, None, Summary]:
    """The loop: epochs of updates, with a validation and a checkpoint after each epoch."""
    position = context.position
    ready = setup.ready(context, train)
    ready.feed.limit = context.fit.limit_train
    if context.settings.adjust:
        context.watchers.append(online_tuning.adjuster(context, ready))
    step, meter = ready.step, Meter(context, ready.clock, ready.updates)
    to_come = None if ready.updates is None else ready.updates - position.update
    schedules.check(ready.scheduler, to_come, None if held_out is None else context.watched)
    context.note_once(schedules.remark(ready.scheduler, ready.updates, ready.feed.length()))
    context.note_once(checkpoint_policy.remark(context, ready, steps))
    if held_out is not None:
        context.note_once(validation_policy.remark(context, ready.feed.length(), to_come))
    _stop_if_stale(context)  # a resumed run may have ended by it
    while not context.world.any(context.ending) and not duration.reached_end(context, epochs, steps):
        if not position.due:
            context.modes.begin_epoch()
            epoch.begin(context, ready.feed)
            if not position.batch:
                started = EpochStarted(update=position.update, epoch=position.epoch)
                _at_epoch(context, "epoch_start", started)
            if not (yield from _epoch(context, ready, meter, steps, held_out)):
                continue
            position.epoch, position.batch, position.due = position.epoch + 1, 0, True
        _close_epoch(context, ready, meter, held_out)
    step.check()
    meter.report()
    if validation_policy.last(context) and not context.world.any(context.ending):
        _validate_last(context, ready, meter, held_out)
    return _finish(context, ready, meter, epochs, steps)


def _epoch(
    context: RunContext, ready: setup.Ready, meter: Meter, steps: int | None, held_out: Iterable[Batch] | None
) -> Generator[Update, None, bool]:
    """The updates that are left of the epoch, and checkpoints in between; returns whether the epoch is complete."""
    feed, position, saving = ready.feed, context.position, checkpoint_policy.SaveOnError(context, ready)
    run, save_intact = Run(context, feed, meter.count, saving), checkpoint_policy.SaveOnError(context, ready, updating=True)
    if validation_policy.due(context):  # the run before was interrupted in it
        with saving:
            _validate_in_epoch(context, ready, meter, held_out)
    for batches in epoch.rounds(context, feed, saving):
        context.log.current()
        try:
            update = ready.step(batches, run)
        except BaseException as error:
            save_intact.explain(error)
            raise
        if not context.world.used:
            break
        if update.applied and not context.fit.state_checked:
            context.fit.state_checked = True
            setup.refuse_unsavable_state(context, feed)
        if validates := context.validate_every is not None and validation_policy.due(context):
            with saving:
                _validate_in_epoch(context, ready, meter, held_out)
        every, saved = context.checkpoint_every, context.fit.saved_best == position.update
        if not saved and (validates if every is None else position.update % every == 0):
            checkpoint_policy.save(context, ready)
        if context.fit.until is not None:
            bounds.stop_if_over_time(context)
        try:  # a with statement calls two functions in each update
            yield update
        except BaseException as error:
            saving.explain(error)
            raise
        if context.world.stopping(context.ending):
            return False
        if position.update == steps:
            left = feed.length()
            return not context.world.any(left is None or left > 0)
    whole = not context.world.any(feed.interrupted)
    context.note_once(feed.short_epoch_note() if whole and context.world.used else None)
    return whole


def _at_epoch(context: RunContext, hook: str, event: EpochStarted | EpochEnded) -> None:
    """Tell the callbacks of ``event``, and call ``hook``, whose random numbers do not change the run."""
    context.log.current()
    consistency.emit_together(context, event)
    if hook in context.hooks:
        with context.world.together(), preserved_random_state():
            context.hooks.call(hook)


def _close_epoch(context: RunContext, ready: setup.Ready, meter: Meter, held_out: Iterable[Batch] | None) -> None:
    """End an epoch: validate, save a checkpoint. If this fails, a checkpoint keeps the epoch."""
    try:
        with epoch.close(context, ready.feed, draws=held_out is not None and context.validate_every is None):
            ended = EpochEnded(update=context.position.update, epoch=context.position.epoch - 1)
            _at_epoch(context, "epoch_end", ended)
            if context.validate_every is None:
                with meter.paused():
                    _validate(context, held_out, ready)
                    checkpoint_policy.keep_best(context, ready)
            else:
                context.position.due = False
    except Exception as error:
        if context.world.known_to_all(error):
            checkpoint_policy.save(context, ready)
        raise
    if context.checkpoint_every is None and not context.position.due and context.fit.saved_best != context.position.update:
        checkpoint_policy.save(context, ready)


def _validate_in_epoch(context: RunContext, ready: setup.Ready, meter: Meter, held_out: Iterable[Batch] | None) -> None:
    """Validate between two updates of an epoch; random generators are as before, whether it comes to its end or not."""
    with meter.paused(), epoch.keep_random(context, ready.feed):
        _validate(context, held_out, ready)
    checkpoint_policy.keep_best(context, ready)


def _validate_last(context: RunContext, ready: setup.Ready, meter: Meter, held_out: Iterable[Batch] | None) -> None:
    """Validate after the last update; a checkpoint then has what was found, or if the validation fails only the update."""
    try:
        _validate_in_epoch(context, ready, meter, held_out)
    except Exception as error:
        if context.world.known_to_all(error):
            checkpoint_policy.save(context, ready)
        raise
    if not validation_policy.last(context) and context.fit.saved_best != context.position.update:
        checkpoint_policy.save(context, ready)


def _validate(context: RunContext, held_out: Iterable[Batch] | None, ready: setup.Ready) -> None:
    """Validate, keep the best parameters, and stop the run if the validation no longer improves."""
    stopping, position = context.watched, context.position
    if held_out is None:
        position.due = False
        return
    setup.average_buffers(context)
    with context.eval_weights.applied():
        context.log.current()
        with context.log.separate() as log:
            found = validation.validate(context, held_out, ready.step, ready.move, lambda: context.fit.interrupted)
        if found is None:
            context.note("The validation was cut off; the run that goes on begins with it.")
            return
        context.results, position.due, position.validated = found, False, position.update
        better = stopping.better(context.results[stopping.metric], position.best)
        if better:
            position.best, position.stale = context.results[stopping.metric], 0
            if context.early_stopping is not None and stopping.restore_best:
                context.best_parameters = state_dict_versions.copied(context.model)
        else:
            position.stale += 1
        context.figure = position.update, context.figure_of(found[stopping.metric])
        for plateau in plateaus(ready.scheduler):
            plateau.step(context.results[stopping.metric])
        # Callbacks see the parameters that were validated, which may be the average.
        logged = means(context.world.gathered(log.take()))
        figures = context.results
        event = Validated(update=position.update, epoch=position.epoch, metrics=figures, best=better, logged=logged)
        consistency.emit_together(context, event)
    _stop_if_stale(context)


def _stop_if_stale(context: RunContext) -> None:
    stopping, stale = context.early_stopping, context.position.stale
    if stopping is not None and stale >= stopping.patience:
        context.stop(f"The validation's {stopping.metric} did not improve {stale} times in a row.")


def _finish(context: RunContext, ready: setup.Ready, meter: Meter, epochs: int | None, steps: int | None) -> Summary:
    """Write the last checkpoint, then give the model its final parameters, then make the summary."""
    newest = None if context.checkpoints is None else context.checkpoints.newest()
    made = context.position.update or context.decided  # else there is no state to resume
    old = newest is None or newest.name != f"update-{context.position.update:08d}" or context.position.due
    if made and context.world.any(old):
        checkpoint_policy.save(context, ready)
    setup.average_buffers(context)
    context.step_state, context.loader_place = ready.step.state_dict(), epoch.position_of_loader(context, ready.feed)
    context.eval_weights.apply(context.best_parameters)
    context.model.eval()
    count, what = (steps, "update") if steps is not None else (epochs, "epoch")
    done = f"1 {what} is done." if count == 1 else f"{count} {what}s are done."
    ended = duration.reached_end(context, epochs, steps)
    summary = meter.summary(context.fit.stop or (done if ended else "Another process was asked to stop."))
    consistency.emit_together(context, Ended(update=context.position.update, epoch=context.position.epoch, summary=summary))
    return summary
