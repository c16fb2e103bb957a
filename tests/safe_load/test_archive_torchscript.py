"""TorchScript files that torch itself would believe: sources and pickles without a bottom, and objects of other classes."""

import pathlib
import re
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from test_archives import rewrite
from torch import nn

from trimtab.errors import IntegrityError
from trimtab.safe_load.archives import load_torchscript


@torch.jit.interface
class Face(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pass


@torch.jit.script
class Counter:
    def __init__(self, start: int) -> None:
        self.start = start

    def get(self) -> int:
        return self.start


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


class Plain(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Outer(nn.Module):
    face: Face
    pairs: list[tuple[int, torch.Tensor]]
    named: dict[str, torch.Tensor]
    maybe: torch.Tensor | None
    fixed: Final[int]

    def __init__(self) -> None:
        super().__init__()
        self.face, self.inner, self.plain = Inner(), Inner(), Plain()
        self.pairs, self.named, self.maybe, self.fixed = [(1, torch.ones(2))], {"a": torch.ones(1)}, None, 7
        self.words, self.sizes, self.rate, self.chain = 'it\'s "quoted" # so', [1, 2], 0.5, nn.Sequential(nn.Linear(4, 4))
        self.lstm = nn.LSTM(4, 4)
        self.register_buffer("state", torch.zeros(1))

    def forward(self, x: torch.Tensor, mode: int = 1) -> torch.Tensor:
        if mode == 1:
            x = x + 1
        elif mode == 2:
            x = x + 2
        else:
            raise ValueError('no \'mode\' # """')
        maybe = self.maybe
        if maybe is not None:
            x = x + maybe
        for _ in range(2):
            x = self.plain(self.chain(self.inner(x))) + self.fixed * self.rate
        self.state += Counter(3).get()
        return self.lstm(self.face(x))[0] + len(self.pairs) + self.named["a"] + self.sizes[0] + len(self.words) + self.state


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("whole") / "m.pt"
    torch.jit.save(torch.jit.script(Outer().eval()), path)
    return path


@pytest.mark.parametrize("form", [lambda module: module, torch.jit.freeze])
def test_everything_that_a_module_may_hold_comes_back(
    form: Callable[[Any], Any], whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    module, x = torch.jit.load(whole), torch.randn(3, 4)
    torch.jit.save(form(module.eval()), tmp_path / "m.pt")
    assert torch.allclose(load_torchscript(tmp_path / "m.pt")(x), torch.jit.load(tmp_path / "m.pt")(x))


def test_long_models_are_not_deep_ones(tmp_path: pathlib.Path) -> None:
    class Long(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(400):
                x = x.relu()
            return torch.cat([x] * 300)

    x = torch.randn(2, 3)
    torch.jit.save(torch.jit.trace(nn.Sequential(Long(), *[nn.ReLU() for _ in range(200)]).eval(), (x,)), tmp_path / "m.pt")
    assert torch.equal(load_torchscript(tmp_path / "m.pt")(x), torch.cat([x.relu()] * 300))


def with_source(change: Callable[[str], str], whole: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
    def edit(records: dict[str, bytes]) -> None:
        name = next(name for name in records if name.endswith(".py") and b"class Outer(" in records[name])
        records[name] = change(records[name].decode()).encode()

    return rewrite(whole, target, edit)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("y = " + "(" * 10_000 + "1" + ")" * 10_000, "nested too deep"),
        ("y = " + "not " * 20_000 + "True", "nested too deep"),
        ("y = 1" + "+1" * 20_000, "nested too deep"),
        ("y = x" + "[0]" * 20_000, "nested too deep"),
        ("\n".join(" " * i + "if True:" for i in range(1, 400)), "indented by"),
        ("if True:\n      pass\n    elif True:\n      pass\n    else:\n      pass", "does not write"),
        ("y = 1\t# a comment", "does not write"),
        ('y = """two\n  plain : int"""', "does not write"),
        ("y = unchecked_cast(__torch__.test_archive_torchscript.Inner, x)", "unchecked"),
        ("y = unchecked_cast(List[__torch__.test_archive_torchscript.Inner], x)", "unchecked"),
    ],
)
def test_source_that_torch_would_not_write_is_refused(
    line: str, words: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    crafted = with_source(
        lambda source: re.sub(r"(?m)^(    state = )", lambda m: f"    {line}\n{m[1]}", source), whole, tmp_path / "m"
    )
    with pytest.raises(IntegrityError, match=words):
        load_torchscript(crafted)


@pytest.mark.parametrize(
    ("declared", "instead"),
    [
        ("plain : __torch__.test_archive_torchscript.Plain", "plain : __torch__.test_archive_torchscript.Inner"),
        ("rate : float", "rate : Tensor"),
        ("sizes : List[int]", "sizes : List[__torch__.test_archive_torchscript.Inner]"),
        ("pairs : List[Tuple[int, Tensor]]", "pairs : List[Tuple[int, Tensor, Tensor]]"),
        ("named : Dict[str, Tensor]", "named : Dict[int, Tensor]"),
        ("state : Tensor", "state : Optional[__torch__.test_archive_torchscript.Inner]"),
        ("inner : __torch__.test_archive_torchscript.Inner", "inner : List[__torch__.test_archive_torchscript.Inner]"),
    ],
)
def test_a_value_of_another_type_than_its_class_declares_is_refused(
    declared: str, instead: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """torch would put it there as it is, and read what lies behind it in memory."""

    def change(source: str) -> str:
        assert source.count(f"  {declared}\n") == 1
        return source.replace(declared, instead)

    with pytest.raises(IntegrityError, match=f"the attribute '{declared.split()[0]}' of .* is not what its class declares"):
        load_torchscript(with_source(change, whole, tmp_path / "m.pt"))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("  rate : int\n", "no such line"),
        ("    rate : int\n", "no such line"),
        ("  rate : float = 1.0\n", "no such line"),
    ],
)
def test_a_declaration_that_reads_in_two_ways_is_refused(
    lines: str, words: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    crafted = with_source(
        lambda source: source.replace("  rate : float\n", f"  rate : float\n{lines}"), whole, tmp_path / "m.pt"
    )
    with pytest.raises(IntegrityError, match=words):
        load_torchscript(crafted)


@pytest.mark.parametrize(
    ("record", "content", "words"),
    [
        ("constants.pkl", b"\x80\x02)" + b"\x85" * 1_000_000 + b"\x85.", "nested too deep"),
        ("constants.pkl", b"\x80\x02(" + b"]" * 20_000 + b"a" * 19_999 + b"t.", "nested too deep"),
        ("constants.pkl", b"\x80\x02)" + b"r" + (2**31 - 1).to_bytes(4, "little") + b".", "a memo out of order"),
        ("constants.pkl", b"\x80\x02]q\x00h\x00a.", "items for something that takes none"),
        (
            "constants.pkl",
            b"\x80\x02ctorch.jit._pickle\nrestore_type_tag\n(K\x01X\x03\x00\x00\x00strtR.",
            "a value that is no str",
        ),
        ("constants.pkl", b"\x80\x02c__torch__.elsewhere\nX\n)\x81}b.", "which the source does not declare"),
    ],
)
def test_a_pickle_that_torch_would_not_write_is_refused(
    record: str, content: bytes, words: str, whole: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    crafted = rewrite(whole, tmp_path / "m.pt", lambda records: records.update({record: content}))
    with pytest.raises(IntegrityError, match=words):
        load_torchscript(crafted)
