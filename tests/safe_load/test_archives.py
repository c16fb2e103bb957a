"""The strict readers against real exploits: each is shown to work on torch itself first, where it does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import pickle
import random
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trimtab.errors import IntegrityError
from trimtab.safe_load.archives import load_program, load_torchscript, save_program
from trimtab.safe_load.symbolic_expressions import clean_expression


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.constant = torch.arange(3.0)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            shifted = self.linear(x) * self.scale + self.constant
        return shifted, shifted.repeat(2, 1)[: x.shape[0] * 2 - 1]


class Touch:
    """Unpickling this makes a file."""

    def __init__(self, marker: pathlib.Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def export() -> torch.export.ExportedProgram:
    batch = torch.export.Dim("batch", min=1, max=64)
    return torch.export.export(Net().eval(), (torch.randn(4, 4),), dynamic_shapes=({0: batch},))


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("pristine") / "program.pt2"
    torch.export.save(export(), path)
    return path


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("script") / "module.pt"
    torch.jit.save(torch.jit.trace(Net().eval(), (torch.randn(4, 4),)), path)
    return path


def rewrite(source: pathlib.Path, target: pathlib.Path, change: Callable[[dict[str, bytes]], None]) -> pathlib.Path:
    """The archive ``source`` with its records changed, written as torch writes it."""
    with zipfile.ZipFile(source) as archive:
        records = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
    change(records)
    with zipfile.ZipFile(target, "w") as archive:
        for name, data in records.items():
            archive.writestr(f"program/{name}", data)
    return target


def edit(record: str, change: Callable[[Any], Any]) -> Callable[[dict[str, bytes]], None]:
    def apply(records: dict[str, bytes]) -> None:
        data = json.loads(records[record])
        change(data)
        records[record] = json.dumps(data).encode()

    return apply


def pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


MODEL = "models/model.json"
WEIGHTS = "data/weights/model_weights_config.json"


def graph(data: Any) -> Any:
    return data["graph_module"]["graph"]


# the readers still read


def test_a_program_comes_back_with_equal_outputs_at_another_batch(pristine: pathlib.Path) -> None:
    x = torch.randn(7, 4)
    expected = torch.export.load(pristine).module()(x)
    got = load_program(pristine).module()(x)
    assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_masks_combined_by_logic_are_kept(tmp_path: pathlib.Path) -> None:
    class Masks(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x > 0) & (x < 1)) | (x > 2) ^ (x < -1)

    x = torch.randn(4, 4)
    program = torch.export.export(Masks(), (x,))
    assert any("__and__" in str(node.target) for node in program.graph.nodes)
    save_program(program, tmp_path / "masks.pt2")
    assert torch.equal(load_program(tmp_path / "masks.pt2").module()(x), Masks()(x))


def test_save_program_leaves_no_pickle_and_no_path_and_torch_reads_it(pristine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    save_program(torch.export.load(pristine), tmp_path / "saved.pt2")
    raw = (tmp_path / "saved.pt2").read_bytes()
    assert str(pathlib.Path(__file__).parent).encode() not in raw
    assert str(pathlib.Path(__file__).parent).encode() in pristine.read_bytes()
    with zipfile.ZipFile(tmp_path / "saved.pt2") as archive:
        assert archive.read("archive/data/sample_inputs/model.pt") == b""
    assert os.listdir(tmp_path) == ["saved.pt2"]
    x = torch.randn(3, 4)
    expected = torch.export.load(pristine).module()(x)
    for program in (torch.export.load(tmp_path / "saved.pt2"), load_program(tmp_path / "saved.pt2")):
        assert torch.equal(program.module()(x)[1], expected[1])


def test_saving_twice_gives_equal_bytes(tmp_path: pathlib.Path) -> None:
    program = export()
    save_program(program, tmp_path / "a.pt2")
    save_program(program, tmp_path / "b.pt2")
    assert (tmp_path / "a.pt2").read_bytes() == (tmp_path / "b.pt2").read_bytes()


def test_control_flow_and_autocast_regions_are_read(tmp_path: pathlib.Path) -> None:
    class Regions(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = x @ x.T
            return torch.cond(y.sum() > 0, lambda t: t + 1, lambda t: t - 1, (y,))

    program = torch.export.export(Regions(), (torch.randn(4, 4),))
    save_program(program, tmp_path / "p.pt2")
    x = torch.randn(4, 4)
    assert torch.equal(load_program(tmp_path / "p.pt2").module()(x), program.module()(x))


def test_tied_and_expanded_weights_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
            self.b.weight = self.a.weight
            self.register_buffer("ids", torch.arange(4).expand(3, 4))
            self.register_buffer("none", torch.empty(0, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.b(self.a(x)) + self.ids.sum() + self.none.sum()

    save_program(torch.export.export(Tied(), (torch.randn(2, 4),)), tmp_path / "p.pt2")
    state = load_program(tmp_path / "p.pt2").state_dict
    assert state["a.weight"].data_ptr() == state["b.weight"].data_ptr()
    assert state["ids"].shape == (3, 4)
    assert state["none"].shape == (0, 4)


# exploits that run on torch.export.load


def exploit_samples(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    records["data/sample_inputs/model.pt"] = pickled(((Touch(marker),), {}))


def exploit_expression(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    def change(data: Any) -> None:
        graph(data)["tensor_values"]["x"]["sizes"][0]["as_expr"]["expr_str"] = f"__import__('os').mkdir({str(marker)!r})"

    edit(MODEL, change)(records)


def exploit_weight(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    edit(WEIGHTS, lambda data: data["config"]["linear.bias"].update(use_pickle=True))(records)
    config = json.loads(records[WEIGHTS])["config"]
    records["data/weights/" + config["linear.bias"]["path_name"]] = pickled(Touch(marker))


def exploit_opaque_constant(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    name = torch.export.pt2_archive.constants.OPAQUE_OBJ_FILENAME_PREFIX + "0"
    entry = {"path_name": name, "is_param": False, "use_pickle": True, "tensor_meta": None}
    edit("data/constants/model_constants_config.json", lambda data: data["config"].update(evil=entry))(records)
    records[f"data/constants/{name}"] = pickle.dumps(Touch(marker))


def exploit_legacy_weights(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    records["data/weights/model.pt"] = pickled(Touch(marker))


def exploit_name(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    """The name of an input becomes source of the generated forward."""
    code = f"x=__import__('os').mkdir({str(marker)!r})"

    def change(data: Any) -> None:
        text = json.dumps(data).replace('"name": "x"', f'"name": "{code}"').replace('"x": {"dtype"', f'"{code}": {{"dtype"')
        data.clear()
        data.update(json.loads(text))

    edit(MODEL, change)(records)


def exploit_operator(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    """An operator that opens any file, and makes it where it is asked to share it."""

    def change(data: Any) -> None:
        values = {"filename": {"as_string": str(marker)}, "shared": {"as_bool": True}, "size": {"as_int": 4}}
        inputs = [{"name": name, "arg": value, "kind": 1} for name, value in values.items()]
        graph(data)["nodes"][-1].update(target="torch.ops.aten.from_file.default", inputs=inputs)

    edit(MODEL, change)(records)


def exploit_tree(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    """A tree spec names a module, which is imported: here one that lies beside the marker."""
    (marker.parent / "evil_module.py").write_text(f"import os; os.mkdir({str(marker)!r}); factory = list")
    context = {"default_factory_module": "evil_module", "default_factory_name": "factory", "dict_context": []}
    spec = json.dumps([1, {"type": "collections.defaultdict", "context": context, "children_spec": []}])

    def change(data: Any) -> None:
        data["graph_module"]["module_call_graph"][0]["signature"]["out_spec"] = spec

    edit(MODEL, change)(records)


def exploit_weight_name(marker: pathlib.Path, records: dict[str, bytes]) -> None:
    """The name of a weight that is no identifier becomes a text in the source of the generated forward, and here ends it."""
    code = f'linear._parameters") and getattr(__import__("os"), "mkdir")("{marker}'
    for record in (MODEL, WEIGHTS):
        records[record] = records[record].replace(b'"linear.bias"', json.dumps(code).encode())


EXPLOITS = [
    exploit_samples,
    exploit_expression,
    exploit_weight,
    exploit_opaque_constant,
    exploit_legacy_weights,
    exploit_name,
    exploit_operator,
    exploit_tree,
    exploit_weight_name,
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("exploit", EXPLOITS)
def test_an_exploit_runs_on_torch_and_is_refused_here(
    exploit: Callable[[pathlib.Path, dict[str, bytes]], None],
    pristine: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    marker = tmp_path / "touched"
    crafted = rewrite(pristine, tmp_path / "program.pt2", lambda records: exploit(marker, records))
    monkeypatch.syspath_prepend(str(tmp_path))
    if exploit is exploit_samples:
        load_program(crafted)  # samples are never looked at, so this program is as good as any
    else:
        with pytest.raises(IntegrityError):
            load_program(crafted).module()
    assert not marker.exists()
    with contextlib.suppress(Exception):  # torch fails in its own many ways once the payload has run
        torch.export.load(crafted).module()(torch.randn(4, 4))
    assert marker.exists(), "the exploit does not work on torch any more; make it real again"


@pytest.mark.filterwarnings("ignore")
def test_guards_are_dropped_instead_of_executed(pristine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    marker = tmp_path / "touched"
    code = f"__import__('os').mkdir({str(marker)!r})"
    crafted = rewrite(pristine, tmp_path / "program.pt2", edit(MODEL, lambda data: data.update(guards_code=[code])))
    load_program(crafted).module()(torch.randn(4, 4))
    assert not marker.exists()
    with contextlib.suppress(AssertionError):
        torch.export.load(crafted).module()(torch.randn(4, 4))
    assert marker.exists(), "the exploit does not work on torch any more; make it real again"


# what a program may not say


def replace_target(target: str) -> Callable[[Any], None]:
    return lambda data: graph(data)["nodes"][-1].update(target=target)


def set_meta(**values: Any) -> Callable[[Any], None]:
    return lambda data: data["config"]["linear.bias"]["tensor_meta"].update(values)


@pytest.mark.parametrize(
    ("record", "change", "words"),
    [
        (MODEL, replace_target("torch.ops.aten.from_file.default"), "not an operator"),
        (MODEL, replace_target("torch.load"), "not an operator"),
        (MODEL, replace_target("torch.ops.aten.__class__.default"), "not an operator"),
        (MODEL, replace_target("torch.ops.prims.__and__.default"), "not an operator"),
        (MODEL, replace_target("torch.ops.load_library"), "not an operator"),
        (MODEL, replace_target("torch.ops.inductor._alloc_from_pool.default"), "not an operator"),
        (MODEL, replace_target("_operator.methodcaller"), "not an operator"),
        (MODEL, replace_target("math.factorial"), "not an operator"),
        (MODEL, replace_target("#ext:op"), "not an operator"),
        (MODEL, replace_target("torch.ops.aten.no_such.default"), "does not have"),
        (MODEL, replace_target("torch.ops.higher_order.auto_functionalized"), "not an operator"),
        (MODEL, lambda d: graph(d)["inputs"].append({"as_string": "' + evil + '"}), "a tensor or a number"),
        (MODEL, lambda d: graph(d)["nodes"][-1]["inputs"][0].update(arg={"as_operator": "torch.load"}), "could run code"),
        (MODEL, lambda d: graph(d)["custom_obj_values"].update(a={"name": "a", "class_fqn": "b"}), "other classes"),
        (MODEL, lambda d: graph(d)["tensor_values"]["x"]["sizes"].append({"as_int": 2**60}), "stride for every axis"),
        (MODEL, lambda d: graph(d)["tensor_values"]["x"].update(dtype=99), "ScalarType"),
        (MODEL, lambda d: d["range_constraints"].update(u99999999999={"min_val": 0, "max_val": 1}), "a symbol"),
        (MODEL, lambda d: d.update(surprise=1), "does not know"),
        (MODEL, lambda d: d["schema_version"].update(major="8"), "whole number"),
        (WEIGHTS, set_meta(sizes=[{"as_int": 2**40}]), "bytes that the file has"),
        (WEIGHTS, set_meta(storage_offset={"as_int": 5}), "bytes that the file has"),
        (WEIGHTS, set_meta(strides=[{"as_int": -1}]), "sensible size"),
        (WEIGHTS, set_meta(sizes=[{"as_int": 2**40}], strides=[{"as_int": 0}]), "bytes that the file has"),
        (WEIGHTS, set_meta(device={"type": "evil", "index": None}), "a device"),
        (WEIGHTS, lambda d: d["config"]["linear.bias"].update(path_name="../../x"), "not a name that torch gives"),
        (WEIGHTS, lambda d: d["config"].pop("linear.bias"), "is missing"),
    ],
)
def test_a_crafted_program_is_refused_in_words(
    record: str, change: Callable[[Any], None], words: str, pristine: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    crafted = rewrite(pristine, tmp_path / "program.pt2", edit(record, change))
    with pytest.raises(IntegrityError, match=words):
        load_program(crafted)


def of_a_later_torch(data: Any, surprise: Any) -> None:
    """The program as a torch of the same major version may write it one day."""
    data["schema_version"]["minor"] += 100
    data["surprise"] = surprise
    data["graph_module"]["surprise"] = graph(data)["nodes"][0]["surprise"] = surprise
    graph(data)["tensor_values"]["x"]["surprise"] = surprise


def test_fields_that_a_later_torch_added_are_read_past(pristine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    later = rewrite(
        pristine, tmp_path / "a.pt2", edit(MODEL, lambda data: of_a_later_torch(data, {"evil": "__import__('os')"}))
    )
    later = rewrite(later, tmp_path / "b.pt2", edit(WEIGHTS, lambda d: d["config"]["linear.bias"].update(surprise=[1])))
    x = torch.randn(4, 4)
    torch.testing.assert_close(load_program(later).module()(x), load_program(pristine).module()(x))
    for version, words in (({"minor": 1}, "the field 'surprise', which this torch"), ({"major": 99}, "does not know")):
        other = rewrite(later, tmp_path / "c.pt2", edit(MODEL, lambda data, v=version: data["schema_version"].update(v)))
        with pytest.raises(IntegrityError, match=words):
            load_program(other)


def test_a_kind_of_value_that_a_later_torch_added_is_refused(pristine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def change(data: Any) -> None:
        of_a_later_torch(data, 1)
        graph(data)["nodes"][0]["inputs"][0]["arg"] = {"as_surprise": 1}

    with pytest.raises(IntegrityError, match="should be a kind of Argument, but is 'as_surprise'"):
        load_program(rewrite(pristine, tmp_path / "program.pt2", edit(MODEL, change)))


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "().__class__.__base__",
        "Symbol('s0').name",
        "lambda: 1",
        "Pow(9, Pow(9, 9))",
        "9**9**9",
        "LShift(1, 10000000000)",
        "factorial(99999)",
        "Max(*s0)",
        "s0 if s1 else s2",
        "Symbol('evil')",
        "(" * 5000 + "1" + ")" * 5000,
        "1" * 5000,
        "s0 # comment",
        "Float('1', precision=1000000000)",
    ],
)
def test_an_expression_is_arithmetic_or_nothing(text: str) -> None:
    with pytest.raises(IntegrityError, match="more than arithmetic"):
        clean_expression(text)


def test_expressions_that_torch_writes_pass_unchanged() -> None:
    for text in (
        "Symbol('s31', positive=True, integer=True)",
        "FloorDiv(Add(Mul(Integer(2), Symbol('s10', integer=True)), Integer(-1)), Integer(3))",
        "Max(Integer(1), Pow(Symbol('u0', integer=True), Integer(2)))",
    ):
        assert clean_expression(text) == text


# the zip around it


def write_zip(path: pathlib.Path, names: list[str], compression: int = zipfile.ZIP_STORED) -> pathlib.Path:
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in names:
            archive.writestr(name, b"x" * 100)
    return path


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("names", "compression", "words"),
    [
        (["p/../../evil"], 0, "not one that torch writes"),
        (["/p/evil"], 0, "not one that torch writes"),
        (["p/a\\b"], 0, "not one that torch writes"),
        (["p/a", "p/a"], 0, "there twice"),
        (["p/a", "q/a"], 0, "2 folders"),
        (["p/a"], zipfile.ZIP_DEFLATED, "is compressed"),
        (["p/data/aotinductor/model/evil.so"], 0, "has no place"),
        (["version"], 0, "not one that torch writes"),
        (["p/byteorder"], 0, "another byte order"),
        (["p/archive_format"], 0, "is missing"),
        ([], 0, "without any record"),
    ],
)
def test_an_odd_zip_is_refused_in_words(names: list[str], compression: int, words: str, tmp_path: pathlib.Path) -> None:
    with pytest.raises(IntegrityError, match=words):
        load_program(write_zip(tmp_path / "p.pt2", names, compression))


def test_a_name_that_other_readers_would_cut_short_is_refused(tmp_path: pathlib.Path) -> None:
    path = write_zip(tmp_path / "p.pt2", ["p/byteorder_evil"])
    path.write_bytes(path.read_bytes().replace(b"p/byteorder_evil", b"p/byteorder\0evil"))
    with pytest.raises(IntegrityError, match="not one that torch writes"):
        load_program(path)


def test_a_missing_file_and_a_folder_are_integrity_errors(tmp_path: pathlib.Path) -> None:
    with pytest.raises(IntegrityError, match="No such file"):
        load_program(tmp_path / "absent.pt2")
    with pytest.raises(IntegrityError, match="Is a directory"):
        load_program(tmp_path)


# TorchScript


def test_torchscript_comes_back(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    x = torch.randn(4, 4)
    assert torch.equal(load_torchscript(script)(x)[1], torch.jit.load(script)(x)[1])
    frozen = torch.jit.freeze(torch.jit.trace(Net().eval(), (x,)))
    torch.jit.save(frozen, tmp_path / "frozen.pt")
    assert torch.equal(load_torchscript(tmp_path / "frozen.pt")(x)[0], frozen(x)[0])


@pytest.mark.filterwarnings("ignore")
def test_torchscript_source_that_writes_files_runs_on_torch_and_is_refused_here(
    script: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    marker = tmp_path / "touched"

    def change(records: dict[str, bytes]) -> None:
        name = next(name for name in records if name.endswith(".py") and b"class Net" in records[name])
        line = f'    torch.save(x, "{marker}")\n'.encode()
        records[name] = records[name].replace(b"    scale = self.scale\n", line + b"    scale = self.scale\n")
        assert line in records[name]

    crafted = rewrite(script, tmp_path / "m.pt", change)
    with pytest.raises(IntegrityError, match="the word 'save'"):
        load_torchscript(crafted)
    torch.jit.load(crafted)(torch.randn(4, 4))
    assert marker.exists(), "the exploit does not work on torch any more; make it real again"


def test_graphs_within_graphs_without_end_are_refused(pristine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    def change(data: Any) -> None:
        lists, tables = ("inputs", "outputs", "nodes"), ("tensor_values", "sym_int_values", "sym_bool_values")
        inner: Any = {name: [] for name in lists} | {name: {} for name in tables}
        for _ in range(60):
            argument = {"name": "a", "arg": {"as_graph": {"name": "g", "graph": inner}}}
            node = {"target": "torch.ops.aten.relu.default", "inputs": [argument], "outputs": [], "metadata": {}}
            inner = inner | {"nodes": [node]}
        graph(data)["nodes"][0]["inputs"][0]["arg"] = {"as_graph": {"name": "g", "graph": inner}}

    with pytest.raises(IntegrityError, match="nests more than 100 deep"):
        load_program(rewrite(pristine, tmp_path / "p.pt2", edit("models/model.json", change)))


@pytest.mark.parametrize(
    ("record", "content", "words"),
    [
        ("data.pkl", lambda old: pickle.dumps(Touch(pathlib.Path("never")), protocol=2), "would run code"),
        ("data.pkl", lambda old: pickle.dumps([1], protocol=4), "the instruction FRAME"),
        ("data.pkl", lambda old: b"garbage", "not one that TorchScript writes"),
        ("data.pkl", lambda old: old[:-20], "not one that TorchScript writes"),
        ("constants.pkl", lambda old: b"\x80\x02c__torch__.torch.classes.profiler\nX\n)\x81.", "would run code"),
        ("constants.pkl", lambda old: b"\x80\x02ccollections\nOrderedDict\nq\x00.", None),
        ("data/0", lambda old: old[:-4], "bytes for '0'"),
        ("evil.pkl", lambda old: b"", "has no place"),
    ],
)
def test_a_crafted_torchscript_file_is_refused_in_words(
    record: str, content: Callable[[bytes], bytes], words: str | None, script: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    def change(records: dict[str, bytes]) -> None:
        records[record] = content(records.get(record, b""))

    crafted = rewrite(script, tmp_path / "m.pt", change)
    with pytest.raises(IntegrityError, match=words):
        load_torchscript(crafted)
    assert not pathlib.Path("never").exists()


def test_a_tensor_beyond_its_storage_is_refused(script: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """torch's own reader believes the shape in the pickle and reads whatever lies behind the storage."""

    def change(records: dict[str, bytes]) -> None:
        before = records["data.pkl"]
        # the bias of three values, shape (3,) and stride (1,), now claims 255 values
        records["data.pkl"] = (
            before.replace(b"K\x00K\x03\x85", b"K\x00K\xff\x85")
            .replace(b"K\x00(K\x03tq", b"K\x00(K\xfftq")
            .replace(b"K\x00(K\x03t(", b"K\x00(K\xfft(")
        )
        assert records["data.pkl"] != before

    with pytest.raises(IntegrityError, match="beyond the bytes that back it"):
        load_torchscript(rewrite(script, tmp_path / "m.pt", change))


# damage


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["program", "script"])
def test_damage_never_ends_in_anything_but_an_integrity_error(
    kind: str, pristine: pathlib.Path, script: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    source, load = (pristine, load_program) if kind == "program" else (script, load_torchscript)
    data = source.read_bytes()
    generator = random.Random(0)
    refused = 0
    for trial in range(150):
        damaged = bytearray(data)
        if trial % 3 == 0:
            damaged = damaged[: generator.randrange(len(data))]
        elif trial % 3 == 1:
            for _ in range(generator.randint(1, 20)):
                damaged[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        else:
            at, size = generator.randrange(len(data)), generator.randint(1, 200)
            damaged[at : at + size] = generator.randbytes(generator.randint(0, 200))
        (tmp_path / "damaged.pt2").write_bytes(damaged)
        try:
            load(tmp_path / "damaged.pt2")
        except IntegrityError:
            refused += 1
    assert refused > 60  # padding between records takes a good part of the bytes


@pytest.mark.filterwarnings("ignore")
def test_scrambled_json_never_ends_in_anything_but_an_integrity_error(pristine: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Damage that the checksums do not see: values of the program swapped for others of any type."""
    generator = random.Random(1)
    odd = [None, True, -1, 2**70, 0.5, "", "x", "s0", "import os", [], {}, [[]], {"as_int": -5}, {"as_tensor": {"name": "x"}}]

    def scramble(node: Any) -> Any:
        if generator.random() < 0.003:
            return generator.choice(odd)
        if isinstance(node, dict):
            return {key: scramble(item) for key, item in node.items()}
        return [scramble(item) for item in node] if isinstance(node, list) else node

    refused = 0
    for trial in range(120):
        record = MODEL if trial % 2 else WEIGHTS

        def change(records: dict[str, bytes], record: str = record) -> None:
            records[record] = json.dumps(scramble(json.loads(records[record]))).encode()

        crafted = rewrite(pristine, tmp_path / "p.pt2", change)
        try:
            load_program(crafted)
        except IntegrityError:
            refused += 1
    assert refused > 20
