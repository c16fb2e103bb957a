"""What ``trimtab doctor`` sees of trainings that a framework runs, and of two ranks of ``torchrun``.

    pip install --target rivals --no-deps accelerate pytorch-lightning lightning-utilities torchmetrics
    python benchmarks/doctor_frameworks.py --rivals rivals         # about ten minutes on two quiet cores

Each script trains the same model on a ``TensorDataset`` that is read one item at a time, which is the planted cause; with the
collate function of the transformers script the remedy is workers. Printed per script: what ended a step, the parts of a step
with their sum, the first findings with their gains, and the gain of all that pays together. The exit status is 1 if a script
was not seen, its parts do not add up to 100% +- 2%, or the cause was not among the findings.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from trimtab.measure.host import other_load

CAUSES = {"one_by_one", "workers_few"}
MODEL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
torch.set_num_threads(1)
examples = TensorDataset(torch.randn(8192, 64), torch.randint(0, 10, (8192,)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, x=None, labels=None):
        logits = self.body(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

"""
SCRIPTS = {
    "transformers": MODEL
    + """
from transformers import Trainer, TrainingArguments


def collate(items):
    return {"x": torch.stack([x for x, _ in items]), "labels": torch.stack([y for _, y in items])}


arguments = TrainingArguments(
    "runs", per_device_train_batch_size=128, num_train_epochs=200, report_to=[], save_strategy="no", use_cpu=True
)
Trainer(Net(), arguments, train_dataset=examples, data_collator=collate).train()
""",
    "lightning": MODEL
    + """
import pytorch_lightning as pl


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, index):
        return self.net(*batch)["loss"]

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


trainer = pl.Trainer(max_epochs=200, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(Module(), DataLoader(examples, batch_size=128, shuffle=True))
""",
    "accelerate": MODEL
    + """
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
net = Net()
net, optimizer, loader = accelerator.prepare(
    net, torch.optim.AdamW(net.parameters()), DataLoader(examples, batch_size=128, shuffle=True)
)
for epoch in range(200):
    for x, labels in loader:
        optimizer.zero_grad()
        accelerator.backward(net(x, labels)["loss"])
        optimizer.step()
""",
    "torchrun": MODEL
    + """
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
net = DistributedDataParallel(Net())
optimizer = torch.optim.AdamW(net.parameters())
sampler = DistributedSampler(examples)
loader = DataLoader(examples, batch_size=128, sampler=sampler)
for epoch in range(200):
    sampler.set_epoch(epoch)
    for x, labels in loader:
        optimizer.zero_grad()
        net(x, labels)["loss"].backward()
        optimizer.step()
""",
}


def examined(name: str, folder: pathlib.Path, budget_s: float, rivals: pathlib.Path | None) -> dict[str, Any]:
    """The JSON of ``trimtab doctor`` for a script; its ``error`` if there is none."""
    (folder / "train.py").write_text(SCRIPTS[name], encoding="utf-8")
    words = ["--", "torchrun", "--nproc_per_node", "2", "train.py"] if name == "torchrun" else ["train.py"]
    command = [sys.executable, "-m", "trimtab", "doctor", "--json", "--budget", f"{budget_s:g}s", *words]
    paths = [str(rivals.absolute())] if rivals is not None else []
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    try:
        found: dict[str, Any] = json.loads(done.stdout)
    except json.JSONDecodeError:
        return {"error": done.stderr[-800:]}
    return found


def told(name: str, found: dict[str, Any]) -> bool:
    """Print a script's rows, and return whether it was seen as it is."""
    if "error" in found:
        print(f"{name}: {found['error']}", flush=True)
        return False
    record, findings = found["record"], found["findings"]
    total = sum(record["phases"].values()) / record["step_ms"]
    parts = ", ".join(f"{phase} {ms / record['step_ms']:.0%}" for phase, ms in record["phases"].items() if ms > 0)
    print(
        f"{name}: {record['steps']} steps of {record['step_ms']:.2f} ms, ended by {record['anchor']} at {record['anchor_site']}"
    )
    print(f"  {parts}; together {total:.1%}")
    for finding in findings[:4]:
        gain = finding["gain"] or finding["most"]
        shown = f"{gain['value']:.2f} ({gain['low']:.2f}-{gain['high']:.2f})" if gain else "not measured"
        print(f"  {finding['rule']}: {shown}, losses {finding['losses']}")
    together = found["together"]
    if together and together["gain"]:
        print("  together {value:.2f} ({low:.2f}-{high:.2f})".format(**together["gain"]))
    sys.stdout.flush()
    return abs(total - 1) <= 0.02 and not CAUSES.isdisjoint(finding["rule"] for finding in findings)


def main() -> int:
    """Examine each script; 1 if one was not seen as it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rivals", type=pathlib.Path, help="folder with the packages")
    parser.add_argument("--scripts", default=",".join(SCRIPTS), help="some of them, with commas between")
    parser.add_argument("--budget", type=float, default=120.0, help="seconds for each")
    asked = parser.parse_args()
    print(other_load())
    good = True
    for name in asked.scripts.split(","):
        with tempfile.TemporaryDirectory(prefix="frameworks-") as folder:
            good &= told(name, examined(name, pathlib.Path(folder), asked.budget, asked.rivals))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
