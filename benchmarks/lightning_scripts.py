"""The trainings of ``examples/trainer/`` with Lightning, to count lines: what each function here needs beside the same parts.

Model, data and loss are those of the script, which each function gets as ``its``, so that its lines are those of the loop: the
module around the model, and what its Trainer is given. They are counted as those of the other two columns of
``docs/comparison.md``, without docstrings and blank lines:

    python benchmarks/lightning_scripts.py
    pip install --target rivals --no-deps pytorch-lightning lightning-utilities torchmetrics
    PYTHONPATH=rivals python benchmarks/lightning_scripts.py --run

``--run`` also makes seven updates of each, and says how far the parameters are from those of the loop by hand. Lightning draws
random numbers of its own, so that these differ where examples are shuffled or the model draws.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import logging
import pathlib
import sys
import warnings
from typing import Any

import torch

try:
    import pytorch_lightning as pl
except ImportError:  # counting needs none
    pl = None

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples" / "trainer"
UPDATES = 7


def actor_critic(its: Any, **options: Any) -> Any:
    """Actor and critic."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.model = its.Agent()

        def training_step(self, played: Any, index: int) -> None:
            for_actor, for_critic = self.optimizers()
            of_critic, of_actor = its.losses(self.model, played)
            for_actor.zero_grad()
            for_critic.zero_grad()
            self.manual_backward(of_critic)
            self.manual_backward(of_actor)
            for_actor.step()
            for_critic.step()

        def configure_optimizers(self) -> Any:
            return its.adam(self.model.actor.parameters()), its.adam(self.model.critic.parameters())

    return Module(), pl.Trainer(**options)


def dqn(its: Any, **options: Any) -> Any:
    """Deep Q-learning."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.Values()

        def training_step(self, moves: Any, index: int) -> Any:
            return its.loss_of(self.model, moves)

        def on_train_batch_end(self, *_: Any) -> None:
            its.follow(self.model)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.model.online.parameters(), lr=1e-3)

    return Module(), pl.Trainer(**options)


def forward_forward(its: Any, **options: Any) -> Any:
    """Forward-Forward."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.model = its.Layers()

        def training_step(self, batch: Any, index: int) -> None:
            true, false = its.pair(batch)
            for name, optimizer in zip(its.LAYERS, self.optimizers(), strict=True):
                loss, true, false = its.layer_loss(getattr(self.model, name), true, false)
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> Any:
            return [its.adam(getattr(self.model, name).parameters()) for name in its.LAYERS]

    return Module(), pl.Trainer(**options)


def gan(its: Any, **options: Any) -> Any:
    """A GAN."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        automatic_optimization = False

        def __init__(self) -> None:
            super().__init__()
            self.model = its.Gan()

        def training_step(self, real: Any, index: int) -> None:
            for_generator, for_critic = self.optimizers()
            drawn = self.model.generator(torch.randn(len(real), 16))
            told = its.functional.softplus(-self.model.critic(real)).mean()
            for_critic.zero_grad()
            self.manual_backward(told + its.functional.softplus(self.model.critic(drawn.detach())).mean())
            for_critic.step()
            for_generator.zero_grad()
            self.manual_backward(its.functional.softplus(-self.model.critic(drawn)).mean())
            for_generator.step()

        def configure_optimizers(self) -> Any:
            return its.adam(self.model.generator.parameters()), its.adam(self.model.critic.parameters())

    return Module(), pl.Trainer(**options)


def graph(its: Any, **options: Any) -> Any:
    """A graph network, with its metric."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.GraphNet()

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model, batch)[0]

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("right", its.right(self.model(batch["links"]), batch).float().mean(), batch_size=34)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.02, weight_decay=5e-4)

    return Module(), pl.Trainer(**options)


def lbfgs(its: Any, **options: Any) -> Any:
    """LBFGS."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = torch.nn.Linear(30, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), max_iter=4)

    return Module(), pl.Trainer(**options)


def mingpt(its: Any, **options: Any) -> Any:
    """A small GPT, with schedule and clipping."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.Gpt()

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = its.optimizer_of(self.model)
            schedule = its.cosine(warmup=0.1)(optimizer, self.trainer.estimated_stepping_batches)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module(), pl.Trainer(gradient_clip_val=1.0, **options)


def sentence_pairs(its: Any, **options: Any) -> Any:
    """Pairs of words."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.Encoder()

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module(), pl.Trainer(**options)


def siamese(its: Any, **options: Any) -> Any:
    """A siamese network, with its metric."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.build()

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model, batch)

        def validation_step(self, batch: Any, index: int) -> None:
            outputs = [self.model(batch[0]), self.model(batch[1])]
            self.log("near", its.near(outputs, batch).float().mean(), batch_size=len(batch[2]))

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    return Module(), pl.Trainer(**options)


def unet(its: Any, **options: Any) -> Any:
    """A U-Net: each batch is divided by its own pixels, so that the two of an update do not count by theirs."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.UNet()

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=3e-3)

    return Module(), pl.Trainer(accumulate_grad_batches=2, **options)


def vae(its: Any, **options: Any) -> Any:
    """A variational autoencoder."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.Autoencoder()

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model, batch)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=2e-3)

    return Module(), pl.Trainer(**options)


def word_lm(its: Any, **options: Any) -> Any:
    """A word model with carried state."""

    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = its.WordModel()

        def training_step(self, batch: Any, index: int) -> Any:
            return its.loss(self.model(*batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=5.0)

    return Module(), pl.Trainer(gradient_clip_val=0.25, **options)


SCRIPTS = [
    actor_critic,
    dqn,
    forward_forward,
    gan,
    graph,
    lbfgs,
    mingpt,
    sentence_pairs,
    siamese,
    unet,
    vae,
    word_lm,
]


def lines(path: pathlib.Path, name: str) -> int:
    """The lines of a function in the file ``path``, without its docstring and blank lines; 0 if it has none of that name."""
    text = path.read_text(encoding="utf-8")
    found = next((n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef) and n.name == name), None)
    if found is None:
        return 0
    return sum(bool(line.strip()) for line in text.splitlines()[found.body[1].lineno - 1 : found.end_lineno])


def counts(name: str) -> tuple[int, int, int]:
    """Lines of a training with the Trainer, with Lightning and by hand; ``step`` is part of the loop where a script has one."""
    script = EXAMPLES / f"{name}.py"
    ours = lines(script, "trainer") + lines(script, "step")
    return ours, lines(pathlib.Path(__file__), name), lines(script, "by_hand")


def apart(name: str, build: Any) -> float:
    """The largest difference of a parameter after seven updates with Lightning from those of the loop by hand."""
    its = importlib.import_module(name)
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    torch.manual_seed(0)
    module, trainer = build(its, max_steps=UPDATES * (2 if name in ("gan", "actor_critic", "forward_forward") else 1),
                            accelerator="cpu", num_sanity_val_steps=0, **quiet)  # fmt: skip
    plays = bool(inspect.signature(its.loader).parameters)
    batches = its.loader(*([module.model] if plays else []))
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None) if isinstance(batches, list) else batches)
    torch.manual_seed(0)
    by_hand = its.by_hand(UPDATES).state_dict()
    found = module.model.state_dict()
    return max(float((value.float() - found[key].float()).abs().max()) for key, value in by_hand.items())


def main() -> None:
    """Print the counts, and with ``--run`` the differences."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--run", action="store_true", help="make seven updates of each with Lightning, too")
    asked = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    fewer = 0
    for build in SCRIPTS:
        name = build.__name__
        ours, theirs, by_hand = counts(name)
        fewer += ours <= theirs
        far = f", {apart(name, build):.1e} from the loop by hand" if asked.run else ""
        print(f"{name:16} trimtab {ours:2}, Lightning {theirs:2}, by hand {by_hand:2}{far}")
    print(f"At most Lightning's lines in {fewer} of {len(SCRIPTS)}.")


if __name__ == "__main__":
    main()
