"""Training on several processes: who they are, what crosses between them, and what happens when one of them fails.

The loop of :class:`~trimtab.train.trainer.Trainer` knows only a :class:`~trimtab.train.runtime.world.World`. Here are those of
more than one process: copies of the model in ``replicas.py``, torch's FSDP2 in ``shards.py``.
"""
