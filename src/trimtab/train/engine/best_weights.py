"""``Trainer.load_best``: give the model the weights of the best validation."""

from __future__ import annotations

from trimtab.errors import UsageError
from trimtab.train.checkpoint.weights import HOW_TO_KEEP, best
from trimtab.train.run_context import RunContext
from trimtab.train.runtime.state_dict_versions import versioned, versions


def load(context: RunContext) -> None:
    """Give the model the weights of the best validation of this run, or of the runs in its checkpoint folder.

    Raises:
        UsageError: no weights were kept, or they are of another model.
        StorageError: no checkpoint in the folder is intact.
    """
    folder, found, now = context.checkpoints, context.best_parameters, context.model.state_dict()
    if folder is not None and folder.update() is not None:
        value = context.position.best
        least = None if found is None or value is None else context.figure_of(value)
        better = best(folder, folder.load(), least)
        if better is not None and better.keys() != now.keys():
            missing = sorted(better.keys() ^ now.keys())
            raise UsageError(
                f"The weights in {folder.folder} are of another model: {', '.join(missing[:3])} differ from this "
                f"{type(context.model).__qualname__}. Give the model that they were made with."
            )
        if better is not None:
            parts = {name: context.world.shard(value, now[name]) for name, value in better.items()}
            found = versioned(parts, versions(better))
    if found is None:
        raise UsageError(f"load_best() has nothing to load: the weights of no validation were kept. {HOW_TO_KEEP}.")
    context.eval_weights.restore_last(update=context.position.update, same=True)
    context.eval_weights.apply(found)
