"""Training on several processes: process groups, exchange of gradients, and handling of failures.

The loop of :class:`~trimtab.train.trainer.Trainer` knows only a :class:`~trimtab.train.runtime.world.World`. This package has
the worlds of several processes: data parallelism in ``data_parallel.py``, torch's FSDP2 in ``fsdp.py``.
"""
