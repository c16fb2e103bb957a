"""Lines of a copy of the script that can be left out."""

from __future__ import annotations

import pathlib

import pytest

from trimtab.probe.line_reuse import with_reuse

WRAPPED = [
    ("x = f(1)", "x = __trimtab_reuse__('train.py:1', lambda: (f(1)))"),
    ("x = f(\n    1,\n)  # as it is", "x = __trimtab_reuse__('train.py:1', lambda: (f(\n    1,\n)))  # as it is"),
    ('é = "é" + g("ü"); ', 'é = __trimtab_reuse__(\'train.py:1\', lambda: ("é" + g("ü"))); '),
    ("x: int = f()", "x: int = __trimtab_reuse__('train.py:1', lambda: (f()))"),
    ("x, y = f(),", "x, y = __trimtab_reuse__('train.py:1', lambda: (f(),))"),
    ("x += f()", "x += __trimtab_reuse__('train.py:1', lambda: (f()))"),
    ("auc.update(x)", "__trimtab_reuse__('train.py:1', lambda: (auc.update(x)))"),
    ("lambda: f()", "__trimtab_reuse__('train.py:1', lambda: (lambda: f()))"),
]


@pytest.mark.parametrize(("before", "after"), WRAPPED)
def test_the_value_of_a_line_goes_through_a_function_and_lines_stay(tmp_path: pathlib.Path, before: str, after: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(f"{before}\nprint(x)\n", encoding="utf-8")
    texts, done = with_reuse(tmp_path, ["train.py:1"])
    assert texts == {str(path): f"{after}\nprint(x)\n"}
    assert done == {"train.py:1"}
    compile(texts[str(path)], "train.py", "exec")


def test_lines_of_one_statement_and_of_several_files(tmp_path: pathlib.Path) -> None:
    (tmp_path / "train.py").write_text("def f():\n    return g(\n        1\n    )\n\n\ny = f()\n", encoding="utf-8")
    (tmp_path / "metrics.py").write_text("z = 1\n", encoding="utf-8")
    texts, done = with_reuse(tmp_path, ["train.py:3", "train.py:7", "metrics.py:1"])
    assert done == {"train.py:3", "train.py:7", "metrics.py:1"}
    assert texts[str(tmp_path / "train.py")].splitlines() == [
        "def f():",
        "    return __trimtab_reuse__('train.py:3', lambda: (g(",
        "        1",
        "    )))",
        "",
        "",
        "y = __trimtab_reuse__('train.py:7', lambda: (f()))",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "for x in f():\n    pass",
        "if f():\n    pass",
        "x = f(); y = g()",
        "pass",
        "import f",
        "print((x := f()))",
        "async def f(): return await g()",
        "def f(): x = yield 1",
        "print(super().f)",
        "print('{x}'.format(**locals()))",
        "async def f(): x = [i async for i in g()]",
        "x = [",
        "",
    ],
)
def test_other_lines_stay_as_they_are(tmp_path: pathlib.Path, text: str) -> None:
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    assert with_reuse(tmp_path, ["train.py:1", "train.py:9", "absent.py:1", "nowhere"]) == ({}, set())


def test_attributes_of_a_class_stay_as_they_are(tmp_path: pathlib.Path) -> None:
    text = "class C:\n    x = 1\n    if x:\n        y = x\n    class D:\n        z = 2\n    def f(self):\n        return 3\n"
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    assert with_reuse(tmp_path, ["train.py:2", "train.py:4", "train.py:6"]) == ({}, set())
    assert with_reuse(tmp_path, ["train.py:8"])[1] == {"train.py:8"}


def test_lines_are_counted_as_python_counts_them(tmp_path: pathlib.Path) -> None:
    """A form feed and other separators end no line of Python."""
    (tmp_path / "train.py").write_text("import os\n\f\ndef f(x):\n    # a\x0bnote\u2028\n    y = g(x)\n", encoding="utf-8")
    ((text,), _) = with_reuse(tmp_path, ["train.py:5"])[0].values(), None
    assert text.split("\n")[4] == "    y = __trimtab_reuse__('train.py:5', lambda: (g(x)))"


@pytest.mark.parametrize("raw", [b"# -*- coding: latin-1 -*-\nx = '\xe9'\n", b"\xef\xbb\xbfx = 1\ny = 2\n"])
def test_files_in_another_coding_stay_as_they_are(tmp_path: pathlib.Path, raw: bytes) -> None:
    (tmp_path / "train.py").write_bytes(raw)
    assert with_reuse(tmp_path, ["train.py:2"]) == ({}, set())
