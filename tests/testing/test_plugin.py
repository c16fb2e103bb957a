"""A plug-in that pip installs is found by name, is held to the same contract, and may not take another's name."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from _places import TESTS

PLUGIN = TESTS / "plugin"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder that pip installed the plug-in into, without network."""
    folder = tmp_path_factory.mktemp("plugin")
    source, target = folder / "source", folder / "site"
    shutil.copytree(PLUGIN, source, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--target", str(target), str(source)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


def python(installed: pathlib.Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(installed)}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=280)


def test_found_by_name(installed: pathlib.Path) -> None:
    code = (
        "from trimtab.core.backend import BACKENDS; from trimtab.core.technique import PASSES\n"
        "from trimtab.core.recipe import Recipe\n"
        "recipe = Recipe(passes=(PASSES['dense_weights'](),), backend=BACKENDS['traced']())\n"
        "assert Recipe.from_json(recipe.to_json()) == recipe\n"
        "assert {'eager', 'traced'} <= set(BACKENDS)\n"
        "print(recipe)"
    )
    done = python(installed, "-c", code)
    assert done.stdout.strip() == "dense_weights + traced", done.stderr


def test_passes_the_suites(installed: pathlib.Path) -> None:
    arguments = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(PLUGIN / "suites.py"))
    done = python(installed, *arguments)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " 1 skipped" in done.stdout, done.stdout[-300:]


def test_a_clash_names_both(installed: pathlib.Path, tmp_path: pathlib.Path) -> None:
    facts = tmp_path / "rude-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: rude\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[trimtab.backends]\neager = rude:Eager\n")
    done = python(tmp_path, "-c", "from trimtab.core.backend import BACKENDS; BACKENDS['eager']")
    assert "Two sources claim the backend 'eager'" in done.stderr
    assert "trimtab.backends.eager" in done.stderr
    assert "rude:Eager (entry point of rude)" in done.stderr


def test_one_that_cannot_be_imported_is_left_out_with_a_note(tmp_path: pathlib.Path) -> None:
    facts = tmp_path / "old_plugin-1.0.dist-info"
    facts.mkdir()
    (tmp_path / "old_plugin.py").write_text("from trimtab.core.technique import SomethingOfAnOlderVersion\n")
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: old-plugin\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[trimtab.passes]\nold = old_plugin:Old\n")
    code = (
        "from trimtab.core.technique import PASSES\n"
        "from trimtab.errors import UsageError\n"
        "assert 'threads' in list(PASSES) and 'old' not in list(PASSES) and len(PASSES) == len(dict(PASSES))\n"
        "try: PASSES['old']\n"
        "except UsageError as error: assert str(error) == PASSES.broken['old']\n"
        "print(PASSES.broken['old'])"
    )
    done = python(tmp_path, "-c", code)
    assert done.stdout.startswith(
        "The pass 'old', old_plugin:Old (entry point of old-plugin), cannot be loaded: ImportError: cannot import name "
    ), done.stderr
    assert done.stdout.endswith("Update or uninstall that package.\n")


def test_its_code_is_among_that_which_a_study_is_held_to(installed: pathlib.Path) -> None:
    code = (
        "import torch\nfrom trimtab.evaluation.code_fingerprint import code_of\n"
        "print('trimtab_demo' in code_of(torch.nn.Identity(), {}))"
    )
    done = python(installed, "-c", code)
    assert done.stdout.strip() == "True", done.stderr
