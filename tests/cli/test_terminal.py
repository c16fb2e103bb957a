"""What a person sees in a terminal: first steps, help, errors, progress, Ctrl-C. Real pseudo-terminals where it matters."""

from __future__ import annotations

import io
import os
import pathlib
import pty
import re
import select
import shlex
import signal
import struct
import subprocess
import sys
import termios
import time
import types
from fcntl import ioctl

import pytest
import typer.main
from rich.console import Console

from _faulty import write
from _workers import workers_that_stay
from trimtab import errors
from trimtab._internal.text import clock
from trimtab.cli import environment
from trimtab.cli._boundary import repeat_command
from trimtab.cli._progress import Board, Lines, Quiet, Reflowing, view
from trimtab.cli.main import COMMANDS, FIRST_STEPS, app, main
from trimtab.core.backend import BACKENDS
from trimtab.core.limits import Limits
from trimtab.core.measurement import Drop, Interval
from trimtab.core.recipe import Recipe
from trimtab.core.technique import PASSES
from trimtab.core.trial import State, Trial
from trimtab.study.samplers.sampler import Ask

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def trimtab(capsys, monkeypatch, *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command that runs in this process."""
    monkeypatch.setattr(sys, "argv", ["trimtab", *arguments])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # typer sets its own
    with pytest.raises(SystemExit) as left:
        main()
    captured = capsys.readouterr()
    assert isinstance(left.value.code, int)
    return left.value.code, captured.out, captured.err


def in_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command of its own, with the modules that it imported on standard error."""
    return subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trimtab", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **environment},
    )


def test_trimtab_alone_says_what_to_do_first(capsys, monkeypatch) -> None:
    code, out, _ = trimtab(capsys, monkeypatch)
    assert (code, out) == (0, FIRST_STEPS)
    shown = [line.split("  ")[1] for line in out.splitlines() if line.startswith("  trimtab ")]
    assert len(shown) == 3
    root = typer.main.get_command(app)
    for line in shown:
        name, *rest = shlex.split(line)[1:]
        assert root.commands[name].make_context(name, rest) is not None
    assert all(len(line) <= 80 for line in out.splitlines())


def test_version(capsys, monkeypatch) -> None:
    code, out, _ = trimtab(capsys, monkeypatch, "--version")
    assert code == 0
    assert re.fullmatch(r"trimtab \d+\.\d+\.\d+ \(torch \S+, Python 3\.\d+\.\d+\)\n", out)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_fits_and_has_an_example(name: str, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    command = typer.main.get_command(app).commands[name]
    text = command.make_context(name, [], resilient_parsing=True).get_help()
    lines = text.splitlines()
    assert re.search(rf"Examples?:\s+trimtab {name}\b", text), text
    assert len(lines) <= 55
    assert max(map(len, lines)) <= 80
    assert lines[2].strip() == COMMANDS[name][1]


@pytest.mark.parametrize("arguments", [("--help",), ("optimize", "--help"), (), ("optimize", "no_such_file.py")])
def test_torch_is_not_imported_before_it_is_needed(arguments: tuple[str, ...]) -> None:
    done = in_python(*arguments)
    assert done.returncode == (2 if "no_such_file.py" in arguments else 0)
    assert not re.search(r"\| +(torch|numpy|optuna|sqlalchemy|plotly)$", done.stderr, re.MULTILINE)


def test_completion_knows_commands_and_options_without_torch() -> None:
    done = in_python(_TRIMTAB_COMPLETE="complete_bash", COMP_WORDS="trimtab optim", COMP_CWORD="1")
    assert done.stdout.split() == ["optimize"]
    assert "torch" not in done.stderr
    done = in_python(_TRIMTAB_COMPLETE="complete_bash", COMP_WORDS="trimtab optimize --max", COMP_CWORD="2")
    assert done.stdout.split() == ["--max-drop", "--max-error"]


def test_every_error_is_in_the_table() -> None:
    rows = errors.table()
    classes = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, Exception)}
    assert {row.name for row in rows if row.name} == classes - {"TrimtabError"}
    assert len({row.code for row in rows}) == len(rows)
    for row in rows:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", row.code)
        assert row.meaning.endswith(".")
        assert row.remedy.endswith(".")
        assert row.exit_code in (2, 3, errors.EXIT_BUG)


def broken(kind: str) -> object:
    raise KeyError("a thing that should be there")


def test_a_bug_is_one_sentence_and_a_file(capsys, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(environment, "lazy_import", broken)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    code, _, err = trimtab(capsys, monkeypatch, "list", "passes")
    assert code == 70
    found = re.fullmatch(
        r"error\[bug\]: trimtab itself failed: KeyError: 'a thing that should be there' This is a bug in trimtab and not in "
        r"your model. Its traceback is in (\S+); please report it with that. TRIMTAB_DEBUG=1 prints it.\n",
        err,
    )
    assert found, err
    text = pathlib.Path(found[1]).read_text()
    assert "$ trimtab list passes\n" in text
    assert 'raise KeyError("a thing that should be there")' in text
    monkeypatch.setenv("TRIMTAB_DEBUG", "1")
    code, _, err = trimtab(capsys, monkeypatch, "list", "passes")
    assert code == 70
    assert err.startswith("Traceback (most recent call last):")


def test_the_command_that_goes_on_is_exact() -> None:
    words = ["optimize", "my model.py", "--fresh", "--budget", "3m"]
    assert repeat_command(words) == "trimtab optimize 'my model.py' --budget 3m"


def trial(number: int, state: State, recipe: Recipe, reason: str | None = None) -> Trial:
    drop = Drop(value=0.001, low=0.0, upper=0.004, n=200, limit=0.01, decided=True, share=True)
    return Trial(
        recipe=recipe,
        state=state,
        number=number,
        reason=reason,
        speedup=Interval(2.0 + number, 1.9 + number, 2.1 + number),
        drop=drop,
        size_mb=11.2,
        seconds=12.4,
    )


def recipe() -> Recipe:
    return Recipe(
        passes=(PASSES["fold_bn"](), PASSES["threads"](count=2)), backend=BACKENDS["onnxruntime"](precision="int8_static")
    )


def story(board: Board) -> None:
    """A study with a trial in every state."""
    trials: list[Trial] = []
    record = types.SimpleNamespace(trials=trials, limits=Limits(), objective="latency")
    board.stage("checking the workload with a dry run")
    board.opened(record)  # type: ignore[arg-type]
    for number, state in enumerate(State):
        board.stage("searching")
        board.began(Ask("precision", recipe()), number)
        reason = None if state is State.COMPLETE else f"Something went wrong {'again ' * 60}"
        trials.append(trial(number, state, recipe(), reason))
        board.ended(trials[-1], record)  # type: ignore[arg-type]
    board.began(Ask("knobs", recipe()), len(trials))


def console(width: int, **environment: str) -> Console:
    variables = {"TERM": "xterm-256color", "COLUMNS": str(width), "LINES": "30"} | environment
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=30, _environ=variables)


def drawn(screen: Console) -> str:
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


@pytest.mark.parametrize("width", [60, 80, 160])
def test_the_live_view_says_it_all_and_fits(width: int) -> None:
    screen = console(width)
    with Board(screen, 600.0, 9) as board:
        story(board)
        picture = Console(file=io.StringIO(), width=width)
        picture.print(board)
    lines = drawn(picture).splitlines()
    text = drawn(picture)
    assert "turning the knobs of the best so far" in text
    assert re.search(r"0:0\d, 9:5\d left|10:00 left", text)
    assert f"now   trial 5: {str(recipe())[:20]}" in text
    assert "best  2.00x (1.90 to 2.10), drop 0.10% (" in text
    assert "done  5 of 9 trials: 1 measured, 1 skip" in text
    everything = ESCAPES.sub("", drawn(screen)).splitlines()
    assert max(map(len, (*lines, *everything))) <= width
    for mark in "✓–✗≠■":
        assert any(line.startswith(mark) for line in everything), mark
    assert drawn(screen).rindex(SHOW) > drawn(screen).rindex(HIDE)


def test_the_live_view_without_colours_and_without_unicode() -> None:
    screen = console(80, NO_COLOR="1")
    with Board(screen, None, None) as board:
        story(board)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]", drawn(screen))
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    plain = Console(file=stream, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    with Board(plain, None, None) as board:
        story(board)
    stream.flush()
    assert stream.buffer.getvalue().isascii()  # type: ignore[attr-defined]


def test_the_view_fits_the_terminal() -> None:
    live = console(80)
    options = {"budget_s": None, "trials": None}
    assert isinstance(view(live, plain=False, quiet=False, **options), Board)
    assert isinstance(view(live, plain=True, quiet=False, **options), Lines)
    assert isinstance(view(live, plain=False, quiet=True, **options), Quiet)
    assert isinstance(view(console(80, TERM="dumb"), plain=False, quiet=False, **options), Lines)
    assert isinstance(view(Console(file=io.StringIO()), plain=False, quiet=False, **options), Lines)


def test_a_narrower_terminal_breaks_lines_and_the_view_knows() -> None:
    screen = console(120)
    display = Reflowing("x" * 120 + "\n" + "y" * 120, console=screen, auto_refresh=False, transient=True)
    with display:
        display.refresh()
        screen.width = 60
        before = len(drawn(screen))
        display.refresh()
    assert drawn(screen)[before:].count("\x1b[1A") >= 3  # up over four lines where two were written


def test_lines_that_a_signal_handler_speaks_between_wait_their_turn() -> None:
    lines = Lines(Console(file=io.StringIO()), 60.0, None)

    class Speaks(io.StringIO):
        def write(self, text: str) -> int:
            if "searching" in text:
                lines.interrupted()
            return super().write(text)

    lines.console = Console(file=Speaks(), width=80)
    lines.stage("searching")
    said = drawn(lines.console).splitlines()
    assert [line.split("] ")[1] for line in said] == [
        "searching",
        "interrupted: finishing with the best so far; press Ctrl-C again to stop at once",
    ]
    assert lines.cut_short


@pytest.mark.parametrize(("seconds", "shown"), [(0, "0:00"), (62.4, "1:02"), (-3, "0:00"), (3723, "1:02:03")])
def test_clock(seconds: float, shown: str) -> None:
    assert clock(seconds) == shown


class Terminal:
    """A command in a pseudo-terminal of its own, as a person has it: keys go in, a stream of text and escapes comes out."""

    def __init__(self, *arguments: str, columns: int = 80) -> None:
        self._handle, theirs = pty.openpty()
        ioctl(self._handle, termios.TIOCSWINSZ, struct.pack("HHHH", 30, columns, 0, 0))
        # the first terminal that the leader of a session opens becomes its own, from which Ctrl-C is a signal to it
        launch = "import os, sys; os.open(os.ttyname(0), os.O_RDWR); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        self._process = subprocess.Popen(
            [sys.executable, "-c", launch, "-m", "trimtab", *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**os.environ, "TERM": "xterm-256color", "COLUMNS": str(columns), "LINES": "30"},
        )
        os.close(theirs)
        self.raw = ""

    @property
    def text(self) -> str:
        """All that came out so far, without escapes."""
        return ESCAPES.sub("", self.raw)

    def until(self, words: str, seconds: float = 120) -> None:
        """Read on until ``words`` came out."""
        deadline = time.monotonic() + seconds
        while words not in self.text:
            assert time.monotonic() < deadline, f"{words!r} never came:\n{self.text}"
            assert self._read(), f"it ended before {words!r} came:\n{self.text}"

    def press(self, key: str) -> None:
        """What the keyboard sends; the terminal makes a signal of Ctrl-C."""
        os.write(self._handle, key.encode())

    def ended(self, seconds: float = 200) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + seconds
        while self._read():
            assert time.monotonic() < deadline, f"it goes on and on:\n{self.text}"
        return self._process.wait()

    def _read(self) -> bool:
        if not select.select([self._handle], [], [], 1.0)[0]:
            return True
        try:
            data = os.read(self._handle, 65536)
        except OSError:  # how Linux says that the other side of a terminal is closed
            return False
        self.raw += data.decode("utf-8", "replace")
        return bool(data)


CTRL_C = "\x03"


def test_ctrl_c_in_a_terminal_ends_with_the_best_so_far(tmp_path) -> None:
    arguments = ["optimize", write(tmp_path, "def made(): return workload()"), "--out", str(tmp_path / "run")]
    arguments += ["--max-drop", "10%", "--timing", "300ms", "--fresh"]
    terminal = Terminal(*arguments)
    terminal.until("trial 1")
    terminal.press(CTRL_C)
    terminal.until("interrupted: finishing with the best so far; press Ctrl-C again")
    code = terminal.ended()
    assert code == 0, terminal.text
    assert terminal.raw.rindex(SHOW) > terminal.raw.rindex(HIDE)
    assert "as_written" in terminal.text
    assert "artifact:" in terminal.text
    assert workers_that_stay(tmp_path) == []
    said = re.sub(r"\s+", "", terminal.text)
    go_on = [word for word in arguments if word != "--fresh"]
    assert f"Togoon:trimtab{''.join(go_on)}" in said
    assert "Traceback" not in terminal.text


def test_two_ctrl_c_in_a_terminal_end_at_once(tmp_path) -> None:
    arguments = ["optimize", write(tmp_path, "def made(): return workload()"), "--out", str(tmp_path / "run")]
    terminal = Terminal(*arguments, "--max-drop", "10%", "--timing", "300ms")
    terminal.until("trial 1")
    terminal.press(CTRL_C)
    terminal.until("interrupted")
    terminal.press(CTRL_C)
    assert terminal.ended(30) == 130
    assert terminal.raw.rindex(SHOW) > terminal.raw.rindex(HIDE)
    assert "interrupted; what was finished is kept. To go on from it: trimtab optimize " in terminal.text
    assert "Traceback" not in terminal.text
    assert workers_that_stay(tmp_path) == []


def test_other_waits_have_a_spinner_on_a_terminal_and_nothing_elsewhere() -> None:
    terminal = Terminal("list", "checks")
    assert terminal.ended() == 0
    assert "looking for checks" in terminal.text
    assert terminal.raw.rindex(SHOW) > terminal.raw.rindex(HIDE)
    done = subprocess.run([sys.executable, "-m", "trimtab", "list", "checks"], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "looking" not in done.stdout


def test_no_worker_hears_the_terminals_ctrl_c() -> None:
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler  # whoever ran before put it back


def test_the_command_to_go_on_has_no_password_and_does_not_begin_anew() -> None:
    words = ["optimize", "a b.py", "--fresh", "--storage", "postgresql://me:p:s@t@host/db", "--out=runs/x"]
    assert repeat_command(words) == "trimtab optimize 'a b.py' --storage 'postgresql://me:***@host/db' --out=runs/x"
