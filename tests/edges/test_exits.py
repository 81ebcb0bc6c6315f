"""Who holds an open array, in which mode, under which thread, when the process ends, and how.

Whatever the answer is: the exit status is the program's own, nothing is printed that does not
belong there, nothing hangs, no process stays, and where the interpreter ends in an orderly way
what was stored is in the file.
"""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edges import budget, nursery

PRELUDE = """
import asyncio, atexit, functools, multiprocessing, os, signal, sys, threading, time, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)
np.save("rows.npy", np.zeros((256, 16), "i4"))
np.save("other.npy", np.zeros((256, 16), "i4"))
for name in ("stripe0", "stripe1"):
    with open(name, "wb") as file:
        file.truncate(8192)
made = lambda: None

def make():
    global made
    x = start()
    made = weakref.ref(x)
    return x
"""

MODES = {
    "r": """
def start():
    x = fw.open("rows.npy", device="cpu", cache="16 KiB", line=512)
    x.gather([1, 2])
    return x
""",
    "r+": """
def start():
    x = fw.open("rows.npy", "r+", device="cpu", cache="16 KiB", line=512)
    x[:64] = 7
    return x
""",
    "create": """
def start():
    x = fw.create("made.npy", "i4", (256, 16), device="cpu", cache="16 KiB", line=512)
    x[:64] = 7
    return x
""",
    "shared": """
def start():
    global other
    cache = fw.Cache("16 KiB", line=512, device="cpu")
    other = fw.open("other.npy", "r+", cache=cache)
    x = fw.open("rows.npy", "r+", cache=cache)
    x[:64] = 7
    other[:64] = 7
    return x
""",
    "asynchronous": """
def start():
    x = fw.open("rows.npy", "r+", device="cpu", cache="16 KiB", line=512)
    for i in range(0, 64, 4):
        x.scatter_async(slice(i, i + 4), 7)
    return x
""",
    "striped": """
def start():
    x = fw.open(fw.storage.Striped(["stripe0", "stripe1"], 4096), "r+", "i4", (256, 16),
                device="cpu", cache="16 KiB", line=512)
    x[:64] = 7
    return x
""",
}

HOLDERS = {
    "a global beside a function": """
def hold():
    global table
    table = make()

def uses_it():
    return table
""",
    "a model in a global": """
class Model:
    def __init__(self):
        self.table = make()
        self.hooks = [self.forward]
    def forward(self, index):
        return self.table.gather(index)

def hold():
    global model
    model = Model()
""",
    "lru_cache": """
@functools.lru_cache
def hold():
    return make()
""",
    "an exception": """
def fails():
    x = make()
    raise KeyError("kept")

def hold():
    global kept
    try:
        fails()
    except KeyError as error:
        kept = error
""",
    "a cycle": """
class Node:
    pass

def hold():
    node = Node()
    node.itself, node.table = node, make()
""",
    "an exit handler": """
def hold():
    x, parent = make(), os.getpid()
    atexit.register(lambda: x.closed or os.getpid() != parent or x.gather([0]))
""",
    "a thread's local": """
local = threading.local()

def hold():
    local.table = make()
""",
    "a generator": """
def reads():
    with make() as x:
        while True:
            yield x.gather([1])

def hold():
    global generator
    generator = reads()
    next(generator)
""",
    "a daemon's frame": """
def hold():
    held = threading.Event()
    def sleep():
        x = make()
        held.set()
        time.sleep(1000)
    threading.Thread(target=sleep, daemon=True).start()
    held.wait()
""",
    "a task": """
async def reads():
    x = make()
    await asyncio.sleep(1000)

def hold():
    global loop, task
    loop = asyncio.new_event_loop()
    task = loop.create_task(reads())
    loop.run_until_complete(asyncio.sleep(0))
""",
}

THREADS = {
    "main": "hold()\n",
    "a thread": """
def work():
    hold()
    ready.set()
    end = time.monotonic() + 0.05
    while time.monotonic() < end and gather_once():
        pass
""",
    "a daemon": """
def work():
    hold()
    ready.set()
    while gather_once():
        pass
""",
}

START = """
ready = threading.Event()

def gather_once():
    x = made()
    try:
        return x is not None and x.gather([1, 2, 3]) is not None
    except fw.errors.FlashwarpError:
        return False
"""

ENDINGS = {
    "return": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "an exception": ("raise ValueError('the end')", 1, "ValueError: the end"),
    "SIGINT": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", -2, "KeyboardInterrupt"),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -15, ""),
    "os._exit": ("os._exit(5)", 5, ""),
    "exec": ("os.execv('/bin/true', ['true'])", 0, ""),
    "a forked child ends": (
        """
child = os.fork()
if child == 0:
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
""",
        0,
        "",
    ),
    "a forked child uses, closes and opens": (
        """
child = os.fork()
if child == 0:
    x = made()
    if x is not None and not x.closed:
        try:
            x.gather([1])
            if x.writable:
                os._exit(9)
        except fw.errors.ForkError:
            if not x.writable:
                os._exit(8)
        x.close()
    with fw.open("rows.npy", device="cpu", cache="16 KiB") as anew:
        anew.gather([1])
    del x
    sys.exit(4)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
""",
        0,
        "",
    ),
    "multiprocessing forks": (
        """
def child():
    with fw.open("rows.npy", device="cpu", cache="16 KiB") as anew:
        anew.gather([1])
process = multiprocessing.get_context("fork").Process(target=child)
process.start()
process.join(15)
assert process.exitcode == 0
""",
        0,
        "",
    ),
    "a forked child execs": (
        """
child = os.fork()
if child == 0:
    os.execv('/bin/true', ['true'])
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
""",
        0,
        "",
    ),
}

ABRUPT = ("SIGTERM", "os._exit", "exec")

Case = tuple[str, str, str, str]


def program(case: Case) -> nursery.Program:
    holder, mode, thread, ending = case
    code = PRELUDE + MODES[mode] + HOLDERS[holder] + START + THREADS[thread]
    if thread != "main":
        code += f"threading.Thread(target=work, daemon={thread == 'a daemon'}).start()\n"
        code += "ready.wait()\n"
    return nursery.Program(" / ".join(case), code + ENDINGS[ending][0], limit_s=10)


def wrong(case: Case, outcome: nursery.Outcome, home: Path) -> str:
    """Say what is wrong with how a program has ended; empty where nothing is."""
    holder, mode, _, ending = case
    _, status, message = ENDINGS[ending]
    if outcome.hung:
        return "hangs"
    if outcome.status != status:
        return f"status {outcome.status}, not {status}"
    if outcome.left:
        return f"{outcome.left} processes are left"
    lines = [line for line in outcome.err.splitlines() if not belongs(line, holder)]
    text = "\n".join(lines)
    if message and (text.count("Traceback") != 1 or message not in lines[-1]):
        return "another message"
    if not message and text:
        return "a message"
    return wrong_files(mode, ending, home)


def belongs(line: str, holder: str) -> bool:
    """Whether asyncio or the default filters of warnings print such a line rightly."""
    asyncio_says = line.startswith(("Task was destroyed", "task: <Task"))
    return "ResourceWarning" in line or (holder == "a task" and asyncio_says)


def wrong_files(mode: str, ending: str, home: Path) -> str:
    expected = {"rows.npy", "other.npy", "stripe0", "stripe1"}
    if mode == "create":
        expected.add("made.npy")
    if left := {path.name for path in home.iterdir()} ^ expected:
        return f"files are left or missing: {left}"
    stored = {"r": [], "create": ["made.npy"], "shared": ["rows.npy", "other.npy"]}
    for name in stored.get(mode, ["rows.npy"] if mode != "striped" else []):
        if problem := wrong_rows(np.load(home / name), ending):
            return f"{name}: {problem}"
    if mode == "striped":
        stripes = [np.fromfile(home / f"stripe{n}", "i4").reshape(-1, 64, 16) for n in (0, 1)]
        return wrong_rows(np.stack(stripes, 1).reshape(256, 16), ending)
    return ""


def wrong_rows(rows: np.ndarray, ending: str) -> str:
    if (rows[64:] != 0).any() or not np.isin(rows[:64], (0, 7)).all():
        return "damaged"
    if ending not in ABRUPT and (rows[:64] != 7).any():
        return "stores are lost"
    return ""


def cases() -> list[Case]:
    """Cover each pair of a holder with a way of ending first, then whatever the seed draws."""
    draw = random.Random(budget.SEED)
    pairs = [
        (holder, draw.choice(list(MODES)), draw.choice(list(THREADS)), ending)
        for holder, ending in itertools.product(HOLDERS, ENDINGS)
    ]
    draw.shuffle(pairs)
    rest = list(itertools.product(HOLDERS, MODES, THREADS, ENDINGS))
    draw.shuffle(rest)
    return list(dict.fromkeys(pairs + rest))


@pytest.mark.timeout(600 + budget.EXITS)
def test_exit_matrix(tmp_path: Path) -> None:
    drawn = cases()[: budget.EXITS]
    failures: list[str] = []
    heads: list[str] = []
    outcomes = nursery.run((program(case) for case in drawn), tmp_path)
    for number, (case, outcome) in enumerate(zip(drawn, outcomes, strict=True)):
        if problem := wrong(case, outcome, tmp_path / str(number)):
            failures.append(f"{problem}: {outcome}")
            heads.append(f"{problem}: {outcome.name}")

    shown = "\n".join([*heads, "", *failures[:3]])
    assert not failures, f"{len(failures)} of {len(drawn)} cases, seed {budget.SEED}:\n{shown}"


SESSION = """
import flashwarp as fw
x = fw.open("rows.npy", "r+", device="cpu", cache="16 KiB")
x[:64] = 7
x.gather([1 << 40])
1 / 0
"""


@pytest.mark.parametrize(
    ("how", "end"),
    [("-i", ""), ("-i", "import sys; sys.exit(3)\n"), ("code.interact", "exit()\n")],
)
def test_interactive_session_after_an_error(tmp_path: Path, how: str, end: str) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((256, 16), "i4"))
    arguments = ["-i", "-q"] if how == "-i" else ["-c", "import code; code.interact()"]

    ran = subprocess.run(
        [sys.executable, *arguments],
        input=SESSION + end,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == (3 if "3" in end else 0), ran.stderr
    assert "ZeroDivisionError" in ran.stderr
    assert ran.stderr.count("Traceback") == 2, ran.stderr
    assert wrong_rows(np.load(tmp_path / "rows.npy"), "return") == ""


def test_opening_while_the_interpreter_ends_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.zeros((256, 16), "i4"))
    code = """
import atexit

def late():
    for make in (
        lambda: fw.open("rows.npy", "r+", device="cpu", cache="16 KiB"),
        lambda: fw.create("late.npy", "i4", 4, device="cpu"),
    ):
        try:
            make()
            print("opened")
        except fw.errors.ClosedError as error:
            print("refused:", error)

atexit.register(late)  # before flashwarp's own: it runs after
import flashwarp as fw
x = fw.open("rows.npy", "r+", device="cpu", cache="16 KiB")
x[:64] = 7
"""

    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.count("refused:") == 2
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]
    assert wrong_rows(np.load(tmp_path / "rows.npy"), "return") == ""
