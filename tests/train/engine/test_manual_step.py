"""Losses that drive, optimizers by name and closures: equal to the loop by hand, also killed and resumed."""

from __future__ import annotations

import copy
import functools
import pathlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, StepLR

from _ranks import failure, on_ranks
from trimtab import DataSettings, DistributedSettings, OptimizerSettings, PrecisionSettings, Settings, Trainer
from trimtab.errors import NonFiniteError, UsageError, WorkloadError
from trimtab.train.loss.manual_run import ManualRun
from trimtab.train.telemetry.events import figures_of


class Gan(nn.Module):
    """A generator of pairs of numbers, and its critic."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 2))
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1))


def losses(model: Gan, real: torch.Tensor) -> tuple[Any, Any]:
    fake = model.generator(torch.randn(len(real), 3))

    def of_critic() -> torch.Tensor:
        return F.softplus(-model.critic(real)).mean() + F.softplus(model.critic(fake.detach())).mean()

    def of_generator() -> torch.Tensor:
        return F.softplus(-model.critic(fake)).mean()

    return of_critic, of_generator


def step(run: ManualRun, real: torch.Tensor) -> torch.Tensor:
    of_critic, of_generator = losses(run.model, real)  # type: ignore[arg-type]
    critic = of_critic()
    run.backward(critic, "critic")
    run.step("critic")
    run.backward(of_generator(), run.optimizers["generator"])
    run.step("generator")
    return critic


def data(sizes: tuple[int, ...] = (8,) * 6) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(1)
    return [torch.randn(size, 2, generator=made) for size in sizes]


def decaying(optimizer: torch.optim.Optimizer, updates: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda update: 1 - update / updates)


def trainer(folder: pathlib.Path | None = None, accumulate: int = 1, **given: Any) -> Trainer:
    torch.manual_seed(0)
    made = Trainer(
        Gan(),
        loss=step,
        optimizer={
            "critic": lambda parameters: torch.optim.Adam(parameters, lr=3e-3),
            "generator": lambda parameters: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9),
        },
        schedule={"critic": decaying, "generator": lambda optimizer, updates: StepLR(optimizer, 2)},
        ema={"generator": 0.9},
        settings=Settings(data=DataSettings(accumulate=accumulate), optimizer=OptimizerSettings(clip_norm=0.5)),
        checkpoint=folder,
        progress=False,
        **given,
    )
    torch.manual_seed(7)
    return made


def by_hand(epochs: int) -> tuple[Gan, dict[str, torch.Tensor]]:
    """The same GAN in a plain loop: its parameters, and the average of the generator's."""
    torch.manual_seed(0)
    model = Gan()
    critic = torch.optim.Adam(model.critic.parameters(), lr=3e-3)
    generator = torch.optim.SGD(model.generator.parameters(), lr=1e-2, momentum=0.9)
    schedules = decaying(critic, 6 * epochs), StepLR(generator, 2)
    average = {name: value.detach().clone() for name, value in model.generator.named_parameters()}
    torch.manual_seed(7)
    made = 0
    for _ in range(epochs):
        for real in data():
            of_critic, of_generator = losses(model, real)
            critic.zero_grad()
            of_critic().backward()
            nn.utils.clip_grad_norm_(model.critic.parameters(), 0.5)
            critic.step()
            generator.zero_grad()
            of_generator().backward()
            nn.utils.clip_grad_norm_(model.generator.parameters(), 0.5)
            generator.step()
            for schedule in schedules:
                schedule.step()
            share = 1 - min(0.9, (1 + made) / (10 + made))
            for name, value in model.generator.named_parameters():
                average[name].lerp_(value.detach(), share)
            made += 1
    return model, average


def test_a_gan_equals_the_loop_by_hand_and_resumes(tmp_path: pathlib.Path) -> None:
    model, average = by_hand(3)
    told: list[dict[str, float]] = []
    run = trainer(callbacks=[lambda _, event: told.append(figures_of(event))])
    summary = run.fit(data(), epochs=3)
    assert summary.updates == 18
    assert summary.loss is not None
    trained = run.model.state_dict()
    for name, value in model.state_dict().items():
        part, _, rest = name.partition(".")
        torch.testing.assert_close(trained[name], value if part == "critic" else average[rest], rtol=1e-6, atol=1e-7)

    killed = trainer(tmp_path, checkpoint_every=1).updates(data(), epochs=3)
    for _ in range(8):
        next(killed)
    killed.close()
    again = trainer(tmp_path).resume()
    again.fit(data(), epochs=3)
    assert all(torch.equal(value, again.model.state_dict()[name]) for name, value in trained.items())
    rates = [group["lr"] for group in again.optimizer.param_groups]
    assert rates == [pytest.approx(0.0), pytest.approx(1e-2 * 0.1**9)]
    last = next(figures for figures in reversed(told) if figures)
    assert [last[f"train/rates/{name}"] for name in ("critic", "generator")] == rates

    with pytest.raises(UsageError, match=r"made with OptimizerDict\(critic=Adam, generator=SGD\), not Adam"):
        Trainer(Gan(), loss=step, optimizer=torch.optim.Adam, checkpoint=tmp_path).resume()


def test_accumulated_batches_of_unequal_size_count_by_their_examples() -> None:
    """Without noise, three batches of one update give the gradient of all their rows."""

    def regress(run: ManualRun, batch: torch.Tensor) -> None:
        run.backward((run.model(batch) - batch.sum(1, keepdim=True)).square().mean())
        assert run.step() == run.last

    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    whole = copy.deepcopy(model)
    batches = data((5, 2, 9))
    for net, given, accumulate in ((model, batches, 3), (whole, [torch.cat(batches)], 1)):
        settings = Settings(data=DataSettings(accumulate=accumulate))
        Trainer(net, loss=regress, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), settings=settings).fit(given, epochs=4)
    torch.testing.assert_close(model.weight, whole.weight)


def test_a_loss_that_no_scale_of_float16_makes_finite_is_named() -> None:
    """It was said to be 0, or the sum of the gradients."""

    def endless(run: ManualRun, batch: torch.Tensor) -> torch.Tensor:
        loss = run.model(batch).float().square().mean() * float("inf")
        run.backward(loss)
        run.step()
        return loss

    settings = Settings(precision=PrecisionSettings(autocast="float16"))
    trainer = Trainer(nn.Linear(2, 1), loss=endless, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), settings=settings)
    with pytest.raises(NonFiniteError, match="The loss was inf and the sum of its gradient (nan|inf)"):
        trainer.fit(data(), epochs=20)


def test_the_precision_of_a_driving_loss_is_that_of_the_settings() -> None:
    found: list[tuple[torch.dtype, torch.dtype]] = []

    def regress(run: ManualRun, batch: torch.Tensor) -> None:
        outputs = run.model(batch)
        loss = (outputs.float() - batch.sum(1, keepdim=True)).square().mean()
        found.append((outputs.dtype, (batch @ batch.T).dtype))
        run.backward(loss)
        run.step()
        assert run.model.weight.dtype == torch.float32

    def made() -> nn.Linear:
        torch.manual_seed(0)
        return nn.Linear(2, 1)

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    model, hand = made(), made()
    Trainer(model, loss=regress, optimizer=sgd, settings=Settings(precision=PrecisionSettings(autocast="bfloat16"))).fit(
        data(), epochs=2
    )
    assert set(found) == {(torch.bfloat16, torch.bfloat16)}
    optimizer = sgd(hand.parameters())
    for batch in 2 * data():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = (hand(batch).float() - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    assert torch.equal(model.weight, hand.weight)


def test_autocast_of_the_function_itself_sees_the_weights_of_each_step() -> None:
    """In one block of autocast the casts of weights are cached, also across a step, unless the cache is emptied."""
    seen: list[bool] = []

    def regress(run: ManualRun, batch: torch.Tensor) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.backward((run.model(batch).float() - 1).square().mean())
            run.step()
            after = run.model(batch)
            torch.clear_autocast_cache()
            seen.append(torch.equal(after, run.model(batch)))

    model = nn.Linear(2, 1)
    Trainer(model, loss=regress, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5)).fit(data(), epochs=1)
    assert seen == [True] * 6


def test_lbfgs_by_its_closure(tmp_path: pathlib.Path) -> None:
    """Equal to the bit with a loss of outputs and targets, with a driving function, by hand, and resumed."""
    x = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    pairs = [(x, x.square().sum(1, keepdim=True))]

    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    def lbfgs(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(parameters, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

    hand = made()
    optimizer = lbfgs(hand.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(hand(pairs[0][0]), pairs[0][1])
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)

    def driving(run: ManualRun, batch: Any) -> None:
        def again() -> torch.Tensor:
            loss = F.mse_loss(run.model(batch[0]), batch[1])
            run.backward(loss)
            return loss

        run.step(closure=again)

    halves = [(x[:13], pairs[0][1][:13]), (x[13:], pairs[0][1][13:])]
    for loss, given, accumulate in ((nn.MSELoss(), pairs, 1), (driving, pairs, 1), (nn.MSELoss(), halves, 2)):
        model = made()
        settings = Settings(data=DataSettings(accumulate=accumulate))
        Trainer(model, loss=loss, optimizer=lbfgs, settings=settings).fit(given, epochs=4)
        torch.testing.assert_close(
            model.state_dict(), hand.state_dict(), rtol=0 if accumulate == 1 else 1e-3, atol=1e-4 * (accumulate - 1)
        )
    killed = Trainer(made(), loss=nn.MSELoss(), optimizer=lbfgs, checkpoint=tmp_path, checkpoint_every=1).updates(
        pairs, epochs=4
    )
    next(killed)
    next(killed)
    killed.close()
    resumed = Trainer(made(), loss=nn.MSELoss(), optimizer=lbfgs, checkpoint=tmp_path).resume()
    resumed.fit(pairs, epochs=4)
    torch.testing.assert_close(resumed.model.state_dict(), hand.state_dict(), rtol=0, atol=0)
    with pytest.raises(UsageError, match="LBFGS computes the loss several times per update.*bfloat16"):
        Trainer(made(), loss=nn.MSELoss(), optimizer=lbfgs, settings=Settings(precision=PrecisionSettings(autocast="float16")))
    with pytest.raises(WorkloadError, match="a closure, which computes one batch anew, in an update of 2 batches"):
        Trainer(made(), loss=driving, optimizer=lbfgs, settings=Settings(data=DataSettings(accumulate=2))).fit(halves, epochs=1)


class SharpnessAware(torch.optim.SGD):
    """Steps by the gradient at the parameters that the given gradient leads to (Foret et al. 2021)."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        """Move up by the gradient, evaluate there, move back and step."""
        parameters = [each for group in self.param_groups for each in group["params"]]
        moved = [each.grad * 0.3 for each in parameters]
        for each, by in zip(parameters, moved, strict=True):
            each.data.add_(by)
        loss = closure()
        for each, by in zip(parameters, moved, strict=True):
            each.data.sub_(by)
        super().step()
        return loss


def test_a_closure_that_is_called_at_moved_parameters_computes_their_gradient() -> None:
    pairs = [(x, x.prod(1, keepdim=True)) for x in data()]
    hand = nn.Linear(2, 1)
    model = copy.deepcopy(hand)
    optimizer = SharpnessAware(hand.parameters(), lr=0.1)
    evaluated = 0

    def closure() -> torch.Tensor:
        nonlocal evaluated
        evaluated += 1
        optimizer.zero_grad()
        loss = F.mse_loss(hand(x), y)
        loss.backward()
        return loss

    for x, y in pairs:  # noqa: B007 - the closure reads them
        closure()
        optimizer.step(closure)
    Trainer(model, loss=nn.MSELoss(), optimizer=lambda parameters: SharpnessAware(parameters, lr=0.1)).fit(pairs, epochs=1)
    assert evaluated == 2 * len(pairs)
    torch.testing.assert_close(model.state_dict(), hand.state_dict(), rtol=0, atol=0)


def test_a_closure_reports_its_first_loss_and_has_the_hooks_of_a_step() -> None:
    called: list[str] = []
    first: list[float] = []

    def driving(run: ManualRun, batch: torch.Tensor) -> None:
        evaluated: list[float] = []

        def again() -> torch.Tensor:
            loss = F.mse_loss(run.model(batch), batch.prod(1, keepdim=True))
            evaluated.append(loss.item())
            run.backward(loss)
            return loss

        run.step(closure=again)
        assert len(evaluated) > 1
        assert called == ["before_step", *["before_backward", "after_backward"] * len(evaluated), "after_step"]
        called.clear()
        first.append(evaluated[0])

    lbfgs = functools.partial(torch.optim.LBFGS, max_iter=3)
    made = Trainer(nn.Linear(2, 1), loss=driving, optimizer=lbfgs, hooks=hooks_into(called))
    assert [float(update.loss) for update in made.updates(data(), epochs=2)] == first
    skipping = Settings(optimizer=OptimizerSettings(nonfinite="skip"))
    for loss in (nn.MSELoss(), driving):
        with pytest.raises(UsageError, match="LBFGS changes parameters .* as optimizer.nonfinite='skip' asks. Use 'raise'"):
            Trainer(nn.Linear(2, 1), loss=loss, optimizer=lbfgs, settings=skipping)
    made = Trainer(nn.Linear(2, 1), loss=driving, optimizer=torch.optim.Adam, settings=skipping)
    with pytest.raises(WorkloadError, match="run.step got a closure, which .* as optimizer.nonfinite='skip' asks. Use 'raise'"):
        made.fit(data(), epochs=1)


def hooks_into(called: list[str]) -> dict[str, Any]:
    """Hooks around a step, each of which adds its name to ``called``."""
    names = ("before_backward", "after_backward", "before_step", "after_step")
    return {name: lambda *_, name=name: called.append(name) for name in names}


def test_hooks_and_clipping_by_value_in_a_driving_function() -> None:
    """A hook doubles the gradient of the mean over two batches, before it is clipped."""
    called: list[str] = []

    def regress(run: ManualRun, batch: torch.Tensor) -> None:
        run.backward((run.model(batch) - 1).square().mean())
        run.step()

    def doubled(made: Trainer) -> None:
        called.append("after_backward")
        made.model.weight.grad *= 2  # type: ignore[operator, union-attr]

    model = nn.Linear(2, 1)
    hand = copy.deepcopy(model)
    Trainer(
        model,
        loss=regress,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        settings=Settings(data=DataSettings(accumulate=2), optimizer=OptimizerSettings(clip_value=0.5)),
        hooks=hooks_into(called) | {"after_backward": doubled},
    ).fit(data(), epochs=1)
    assert called == ["before_backward", "before_backward", "after_backward", "before_step", "after_step"] * 3
    optimizer = torch.optim.SGD(hand.parameters(), lr=0.1)
    for pair in zip(data()[::2], data()[1::2], strict=True):
        optimizer.zero_grad()
        (hand(torch.cat(pair)) - 1).square().mean().backward()
        assert hand.weight.grad is not None
        hand.weight.grad *= 2
        nn.utils.clip_grad_value_(hand.parameters(), 0.5)
        optimizer.step()
    torch.testing.assert_close(model.state_dict(), hand.state_dict())


def test_the_scale_of_float16_comes_down_if_one_of_several_gradients_overflows() -> None:
    """The one that did not came last, and the update counted as one that no scale makes finite."""

    def regress(run: ManualRun, batch: torch.Tensor) -> None:
        for name, outputs, target in (
            ("critic", run.model.critic(batch), 1e3),  # type: ignore[operator]
            ("generator", run.model.generator(F.pad(batch, (0, 1))), 0.0),  # type: ignore[operator]
        ):
            run.backward((outputs.float() - target).square().mean() * (1 if target else 1e-3), name)
            run.step(name)

    adam, settings = torch.optim.Adam, Settings(precision=PrecisionSettings(autocast="float16"))
    made = Trainer(Gan(), loss=regress, optimizer={"critic": adam, "generator": adam}, settings=settings)
    summary = made.fit(data(), epochs=4)
    assert 0 < summary.skipped < summary.updates


def test_what_is_wrong_is_said() -> None:
    adam = torch.optim.Adam
    with pytest.raises(UsageError, match="optimizer has 'actor', and Gan has no part of that name.*generator, critic"):
        Trainer(Gan(), loss=step, optimizer={"actor": adam})
    with pytest.raises(UsageError, match="Several have names: optimizer=.*docs/training-loops.md"):
        Trainer(Gan(), loss=step, optimizer=[adam])  # type: ignore[arg-type]
    model = Gan()
    with pytest.raises(UsageError, match="'a' and 'b' have a parameter of shape .* in common"):
        Trainer(model, loss=step, optimizer={"a": adam(model.parameters()), "b": adam(model.critic.parameters())})
    with pytest.raises(UsageError, match="schedule has 'x', and no optimizer is called that; those are critic"):
        Trainer(Gan(), loss=step, optimizer={"critic": adam}, schedule={"x": decaying})
    with pytest.raises(UsageError, match="Settings have compile='auto'.*cannot be repeated"):
        Trainer(Gan(), loss=step, optimizer={"critic": adam}, settings=Settings(compile="auto"))

    def fails(run: ManualRun, batch: Any) -> None:
        loss = run.model(batch).mean()
        run.backward(loss * float(batch[0, 0]))
        run.step("adam" if batch[0, 1] else None)

    def one(value: float, name: float) -> list[torch.Tensor]:
        return [torch.tensor([[value, name]])]

    with pytest.raises(WorkloadError, match="The run has no optimizer 'adam'. It has 'optimizer'"):
        Trainer(nn.Linear(2, 1), loss=fails, optimizer=adam).fit(one(1.0, 1.0), epochs=1)
    with pytest.raises(NonFiniteError, match="The gradient for the optimizer 'optimizer' is not finite"):
        Trainer(nn.Linear(2, 1), loss=fails, optimizer=adam).fit(one(float("nan"), 0.0), epochs=1)
    skipping = Settings(optimizer=OptimizerSettings(nonfinite="skip"))
    assert (
        Trainer(nn.Linear(2, 1), loss=fails, optimizer=adam, settings=skipping).fit(one(float("nan"), 0.0), epochs=2).skipped
        == 2
    )
    with pytest.raises(WorkloadError, match="returned nothing and called no run.backward"):
        Trainer(nn.Linear(2, 1), loss=lambda run, batch: None, optimizer=adam).fit(one(1.0, 0.0), epochs=1)
    left = Trainer(nn.Linear(2, 1), loss=lambda run, batch: run.backward(run.model(batch).mean()), optimizer=adam)
    assert "gradients of optimizer were used by no step" in "".join(left.fit(one(1.0, 0.0), epochs=1).notes)


def test_validation_calls_the_function_without_steps() -> None:
    run = trainer()
    before = copy.deepcopy(run.model.state_dict())
    figure = run.validate(data())["loss"]
    assert figure > 0
    torch.testing.assert_close(run.model.state_dict(), before, rtol=0, atol=0)


SIZES = (5, 2, 9, 4, 3)


def regressions(run: ManualRun, batch: torch.Tensor) -> None:
    """Each part learns by itself, without noise."""
    run.backward((run.model.critic(batch) - batch.sum(1, keepdim=True)).square().mean(), "critic")  # type: ignore[operator]
    run.step("critic")
    run.backward((run.model.generator(F.pad(batch, (0, 1))) - batch).square().mean(), "generator")  # type: ignore[operator]
    run.step("generator")


def regressed(accumulate: int, loss: Any = regressions, **distributed: Any) -> Trainer:
    torch.manual_seed(0)
    settings = Settings(
        data=DataSettings(accumulate=accumulate),
        optimizer=OptimizerSettings(clip_norm=0.5),
        distributed=DistributedSettings(**distributed),
    )
    adam = torch.optim.Adam
    made = Trainer(Gan(), loss=loss, optimizer={"critic": adam, "generator": adam}, settings=settings, progress=False)
    made.fit(data(SIZES), epochs=2)
    return made


def layer_by_layer(model: nn.Sequential, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """A loss that goes through the model itself, which several processes give it too."""
    x = model[0](batch[0])
    for layer in model[1:]:
        x = layer(x)
    return F.mse_loss(x, batch[1])


def fitted(accumulate: int) -> dict[str, torch.Tensor]:
    """LBFGS with an ordinary loss, in float64, in which rounding does not change its line search."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    pairs = [(x.double(), x.double().square().sum(1, keepdim=True)) for x in data(SIZES)]
    lbfgs = functools.partial(torch.optim.LBFGS, lr=0.5, max_iter=5, line_search_fn="strong_wolfe")
    settings = Settings(data=DataSettings(accumulate=accumulate))
    Trainer(model, loss=layer_by_layer, optimizer=lbfgs, settings=settings, progress=False).fit(pairs, epochs=2)
    return model.state_dict()


def on_each_rank(folder: pathlib.Path) -> dict[str, Any]:
    def fails(run: ManualRun, batch: torch.Tensor) -> None:
        regressions(run, batch)
        if run.update == 1 and torch.distributed.get_rank() == 1:
            raise ValueError("injected")

    def differs(run: ManualRun, batch: torch.Tensor) -> None:
        run.backward(run.model.critic(batch).mean())  # type: ignore[operator]
        run.step("generator" if torch.distributed.get_rank() else "critic")

    made = regressed(1)
    return {
        "parameters": {name: value.tolist() for name, value in made.model.state_dict().items()},
        "fitted": {name: value.tolist() for name, value in fitted(1).items()},
        "updates": made.position.update,
        "failed": failure(lambda: regressed(1, fails)),
        "differed": failure(lambda: regressed(1, differs)),
        "refused": failure(lambda: regressed(1, communication="bfloat16")),
    }


def test_several_processes_make_the_steps_of_one(tmp_path: pathlib.Path) -> None:
    """Batches of unequal size, of which one process has more: equal to one process that accumulates."""
    found, wanted = on_ranks(on_each_rank, tmp_path), regressed(2)
    for each in found:
        assert each["updates"] == wanted.position.update == 6
        for name, value in wanted.model.state_dict().items():
            torch.testing.assert_close(torch.tensor(each["parameters"][name]), value, rtol=1e-5, atol=1e-6)
        for name, value in fitted(2).items():
            torch.testing.assert_close(torch.tensor(each["fitted"][name], dtype=torch.float64), value, rtol=1e-6, atol=1e-8)
        assert "run.step was called for one optimizer in one process, and for another" in each["differed"][1]
        assert "Settings have distributed.communication='bfloat16'" in each["refused"][1]
    assert found[0]["failed"] == ["PeerError", "The process of rank 1 failed; its own message says why."]
    assert "injected" in found[1]["failed"][1]
