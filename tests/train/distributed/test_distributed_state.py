"""Models that are spread over processes, their checkpoints, and runs that are torn down and started again."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from _ranks import on_ranks
from _runs import settings_of
from trimtab.core.settings import DistributedSettings, Settings
from trimtab.errors import UsageError
from trimtab.train.distributed.launch import join
from trimtab.train.distributed.tensor_parallel import mesh, split_layers
from trimtab.train.trainer import Trainer

pytestmark = pytest.mark.usefixtures("peaks_known")

SIZE, CLASSES = 16, 4


class Block(nn.Module):
    """A transformer block that counts its heads from what it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(SIZE), nn.LayerNorm(SIZE)
        self.query, self.key, self.value = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 4 * SIZE), nn.Linear(4 * SIZE, SIZE)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        batch, length, _ = inputs.shape
        hidden = self.norm1(inputs)
        q, k, v = (layer(hidden).view(batch, length, -1, 4).transpose(1, 2) for layer in (self.query, self.key, self.value))
        seen = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, -1)
        inputs = inputs + self.out(seen)
        result: torch.Tensor = inputs + self.down(nn.functional.gelu(self.up(self.norm2(inputs))))
        return result


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(SIZE, CLASSES)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            inputs = block(inputs)
        result: torch.Tensor = self.head(inputs).mean(1)
        return result


class Scaled(nn.Module):
    """A model with a parameter that has no dimension, as CLIP's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.scale = nn.ModuleList([nn.Linear(SIZE, CLASSES)]), nn.Parameter(torch.tensor(1.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers[0](inputs).mean(1) * self.scale
        return found


class Again(nn.Module):
    """Layers in lists of lists, some of which stand there twice."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner, self.head = nn.ModuleList([Block()]), nn.Linear(SIZE, CLASSES)
        shared = Transformer()
        shared.head = nn.Linear(SIZE, SIZE)
        self.first, self.second = nn.ModuleList([inner[0], Block(), inner[0]]), nn.ModuleList([inner[0]])
        self.last = nn.ModuleList([shared, shared.blocks[1]])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for block in (*self.first, *self.second, self.last[1]):
            inputs = block(inputs)
        result: torch.Tensor = self.head(inputs).mean(1) + self.last[0](inputs)[:, :CLASSES]
        return result


COLUMNS, ROWS = ["*.query", "*.key", "*.value", "*.up"], ["*.out", "*.down"]


def batches(count: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    sizes = [4 + index % 3 for index in range(count)]
    return [
        (torch.randn(size, 5, SIZE, generator=random), torch.randint(0, CLASSES, (size,), generator=random)) for size in sizes
    ]


def trainer(
    checkpoint: pathlib.Path | None = None, *, world: Any = None, model: nn.Module | None = None, **settings: Any
) -> Trainer:
    return Trainer(
        model or Transformer(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, eps=1e-4),
        settings=settings_of(clip_norm=1.0, **settings),
        checkpoint=checkpoint,
        world=world,
    )


def whole(model: nn.Module) -> list[float]:
    values = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    found: list[float] = torch.cat([value.detach().flatten() for value in values]).tolist()
    return found


def run(made: Trainer, epochs: int) -> dict[str, Any]:
    summary = made.fit(batches(), batches(4), epochs=epochs)
    held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in made.model.state_dict().values())
    return {"parameters": whole(made.model), "loss": summary.loss, "validation": summary.metrics["loss"], "held": held}


def checks(folder: pathlib.Path) -> dict[str, Any]:
    """What the two processes do; between the lines, they read and write checkpoints in ``folder``."""
    found = {
        "shard": run(trainer(accumulate=2, sharding="shard"), 3),
        "replicate from one": run(trainer(folder / "one", accumulate=2).resume(), 3),
        "shard from one": run(trainer(folder / "one copy", accumulate=2, sharding="shard").resume(), 3),
    }
    run(trainer(folder / "shard", accumulate=2, sharding="shard"), 2)
    found["shard from shard"] = (
        run(trainer(folder / "shard copy", accumulate=2, sharding="shard").resume(), 3) if copied(folder) else {}
    )
    run(trainer(folder / "replicate", accumulate=2), 2)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    found["hybrid"] = run(trainer(accumulate=2, sharding="hybrid"), 3)
    found["narrow"] = run(trainer(accumulate=2, sharding="shard", communication="bfloat16"), 3)
    for name, size in (("split", 2), ("split by one", 1)):
        grid = mesh(size)
        model = split_layers(Transformer(), grid, columns=COLUMNS, rows=ROWS)
        made = trainer(folder / name, world=join(Settings(), grid), model=model, accumulate=2 * size)
        found[name] = run(made, 3)
    found["split, foreach"] = run(split_in_two(accumulate=4, foreach=True), 3)
    found["again"] = run(trainer(model=Again(), accumulate=2, sharding="shard"), 2)
    found["two trainers"] = two_trainers(2, sharding="shard")
    found["overflow"] = overflow()
    found["refused"] = refused()
    found["dropout"] = dropout(folder / "dropout")
    return found


def two_trainers(accumulate: int, **settings: Any) -> dict[str, Any]:
    """One model, trained by one trainer after the other."""
    first = trainer(accumulate=accumulate, **settings)
    first.fit(batches(), epochs=1)
    return run(trainer(model=first.model, accumulate=accumulate, **settings), 2)


def split_in_two(*, foreach: bool | None = None, **settings: Any) -> Trainer:
    """Both processes have the same data, and layers split between them beside others that are whole."""
    grid = mesh(2)
    model = split_layers(Transformer(), grid, columns=COLUMNS, rows=ROWS)
    made = trainer(world=join(Settings(), grid), model=model, **settings)
    for group in made.optimizer.param_groups:
        group["foreach"] = foreach
    return made


def overflow() -> list[bool]:
    """Which updates were made, where a gradient of the second process overflows in the third."""
    made, calls = split_in_two(autocast="float16"), list[int]()

    def spoil(weight: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and torch.distributed.get_rank() == 1:
            weight.grad.to_local()[0, 0] = torch.inf

    made.model.blocks[1].up.weight.register_post_accumulate_grad_hook(spoil)  # type: ignore[union-attr, index]
    return [update.applied for update in made.updates(batches(5), epochs=1)]


def dropout(folder: pathlib.Path) -> list[float | None]:
    """The last losses of a run with dropout, and of one that was gone on with in the middle of an epoch."""
    losses: list[float | None] = []
    for place, steps in ((folder / "whole", 6), (folder / "cut", 3), (folder / "cut", 6)):
        model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(5 * SIZE, CLASSES))
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
        if not place.exists():
            torch.manual_seed(3)
        made = trainer(place, model=model)
        made.context.log_every = 1
        losses.append(made.resume(missing_ok=True).fit(batches(), steps=steps).loss)
    return [losses[0], losses[2]]


def copied(folder: pathlib.Path) -> bool:
    """Have a copy of the first process's checkpoints."""
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        shutil.copytree(folder / "shard", folder / "shard copy")
    torch.distributed.barrier()
    return True


def refused() -> list[str]:
    sentences = []
    for settings in (
        {"sharding": "shard", "communication": "powersgd"},
        {"exact_batchnorm": True},
        {"sharding": "shard", "memory_format": "channels_last"},
        {"model": Scaled(), "sharding": "shard"},
        {"model": trainer(sharding="shard").model, "sharding": "shard", "communication": "bfloat16"},
        {"world": "cuda"},
    ):
        try:
            if settings.get("world") == "cuda":
                join(Settings(device="cuda"), mesh(2))
            trainer(**settings)
        except UsageError as error:
            sentences.append(str(error))
    model = Transformer()
    try:
        Trainer(
            model,
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            settings=Settings(distributed=DistributedSettings(sharding="shard")),
        )
    except UsageError as error:
        sentences.append(str(error))
    try:
        split_layers(Transformer(), mesh(2), columns=["*.nothing"])
    except UsageError as error:
        sentences.append(str(error))
    return sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """One process, three epochs."""
    return run(trainer(accumulate=4), 3)


@pytest.fixture(scope="module")
def found(folder: pathlib.Path, peaks_known: None) -> list[dict[str, Any]]:
    for name in ("one", "one copy"):
        run(trainer(folder / name, accumulate=4), 2)
    return on_ranks(checks, folder)


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(
        torch.tensor(found["parameters"]), torch.tensor(wanted["parameters"]), rtol=tolerance, atol=tolerance
    )
    assert found["validation"] == pytest.approx(wanted["validation"], rel=tolerance)


@pytest.mark.parametrize(
    "how",
    ["shard", "hybrid", "split", "split, foreach", "split by one", "replicate from one", "shard from one", "shard from shard"],
)
def test_a_model_that_is_spread_trains_as_on_one_process(found: list[dict[str, Any]], alone: dict[str, Any], how: str) -> None:
    for each in found:
        assert_same(each[how], alone, 5e-5)


def test_a_layer_that_stands_in_lists_twice_is_shared_out_once(found: list[dict[str, Any]]) -> None:
    wanted = run(trainer(model=Again(), accumulate=4), 2)
    for each in found:
        assert_same(each["again"], wanted, 5e-5)


def test_a_model_that_is_shared_out_can_be_given_to_another_trainer(found: list[dict[str, Any]]) -> None:
    wanted = two_trainers(4)
    for each in found:
        assert_same(each["two trainers"], wanted, 5e-5)


def test_gradients_of_shards_can_cross_in_bfloat16(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert found[0]["narrow"]["parameters"] != alone["parameters"]
    assert found[0]["narrow"]["validation"] == pytest.approx(alone["validation"], rel=0.02)


def test_float16_that_overflows_in_a_part_leaves_out_the_update_of_all(found: list[dict[str, Any]]) -> None:
    assert [each["overflow"] for each in found] == [[True, True, False, True, True]] * 2


def test_each_process_holds_a_share(found: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    assert sum(each["shard"]["held"] for each in found) == alone["held"]
    assert found[0]["shard"]["held"] < 0.6 * alone["held"]
    assert found[0]["split"]["held"] < 0.6 * alone["held"]


@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_one_process_goes_on_with_what_two_have_written(
    folder: pathlib.Path, found: list[dict[str, Any]], alone: dict[str, Any], kind: str
) -> None:
    assert found
    for place in (folder / kind).glob("update-*"):
        assert {file.suffix for file in place.iterdir()} == {".json", ".safetensors"}
    assert_same(run(trainer(folder / kind, accumulate=4).resume(), 3), alone, 5e-5)


def test_what_does_not_go_together_is_refused(found: list[dict[str, Any]]) -> None:
    powersgd, batchnorm, layout, scalar, earlier, device, optimizer, name = found[0]["refused"]
    assert layout.startswith("memory_format='channels_last' cannot be combined with a model that is shared out: FSDP2 takes")
    assert scalar == (
        "The parameter scale is a number without a dimension along which it could be shared out. Make it of shape (1,), or "
        "take sharding='replicate'."
    )
    assert earlier.startswith(
        "An earlier Trainer has shared the model out already, with another sharding, communication or mesh."
    )
    assert device == (
        "Settings device is 'cuda', but the mesh is of processes on 'cpu'. Make it with the settings of the run: mesh(model=2, "
        "settings=settings)."
    )
    assert powersgd.startswith(
        "Settings distributed.communication='powersgd' needs sharding='replicate', because FSDP2 scatters gradients"
    )
    assert batchnorm.startswith("exact_batchnorm over several processes is torch's SyncBatchNorm, which runs on GPUs only.")
    assert optimizer.endswith("or give a function that makes it: optimizer=lambda parameters: torch.optim.AdamW(parameters).")
    assert name.startswith("No module of Transformer is called '*.nothing'; there are")


def test_dropout_goes_on_where_it_was_in_each_process(found: list[dict[str, Any]]) -> None:
    whole, resumed = found[0]["dropout"]
    assert whole == resumed == found[1]["dropout"][0]


def test_resumption_may_find_nothing(tmp_path: pathlib.Path) -> None:
    made = trainer(tmp_path / "none").resume(missing_ok=True)
    assert made.fit(batches(), epochs=1).updates == 8
    assert trainer(tmp_path / "none").resume(missing_ok=True).position.update == 8


SCRIPT = """
import json, os, pathlib, signal, sys
import torch
from torch import nn
from trimtab.core.settings import DataSettings, Settings
from trimtab.train.trainer import Trainer

torch.set_num_threads(1)
torch.manual_seed(0)
out = pathlib.Path.cwd()
world = int(os.environ.get("WORLD_SIZE", "1"))
random = torch.Generator().manual_seed(1)
data = [(torch.randn(6, 8, generator=random), torch.randint(0, 4, (6,), generator=random)) for _ in range(20)]
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))

def kill(trainer, event):
    flag = out / "killed"
    if trainer.position.update == 13 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)

trainer = Trainer(
    model,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2),
    checkpoint=out / "checkpoints",
    checkpoint_every=5,
    log_every=1,
    settings=Settings(data=DataSettings(accumulate=2 // world)),
)
if os.environ.get("RANK") == "1":
    trainer.context.watchers.append(kill)
trainer.resume(missing_ok=True)
began = trainer.position.update
summary = trainer.fit(data, epochs=3)
if trainer.world.leads:
    (out / "result.json").write_text(json.dumps([began, summary.loss, [p.sum().item() for p in model.parameters()]]))
    print(summary)
"""


def script(folder: pathlib.Path, *launcher: str) -> subprocess.CompletedProcess[str]:
    """Run the same script alone, or through a launcher."""
    folder.mkdir()
    (folder / "script.py").write_text(SCRIPT, encoding="utf-8")
    return subprocess.run(
        [sys.executable, *launcher, "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.slow
def test_a_killed_process_is_started_again_and_the_run_ends_as_it_would_have(tmp_path: pathlib.Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3"]
    whole = script(tmp_path / "whole")
    killed = script(tmp_path / "killed", *torchrun, "--monitor-interval=0.1")
    assert whole.returncode == 0, whole.stderr
    assert killed.returncode == 0, killed.stderr
    assert (tmp_path / "killed" / "killed").exists()
    began, loss, sums = json.loads((tmp_path / "whole" / "result.json").read_text(encoding="utf-8"))
    again, loss_again, sums_again = json.loads((tmp_path / "killed" / "result.json").read_text(encoding="utf-8"))
    assert (began, again) == (0, 10)
    assert loss_again == pytest.approx(loss, rel=1e-5)
    assert sums_again == pytest.approx(sums, rel=1e-4)
    assert killed.stdout.count("updates in") == 1, "only the first process prints"
    assert killed.stderr.count("failed (exitcode") == 1, "no restart was used up in vain"
    assert "Another process is gone; this one ends too." in killed.stderr
