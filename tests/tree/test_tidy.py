"""Rules that people forget, read off the sources: who may import whom, and what a file must say."""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib
import inspect
import re
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import flashwarp

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "flashwarp"
HEADERS = PACKAGE / "include" / "flashwarp"

# Rooms that measure, show and test: what the product may not need.
NO_PRODUCT = {"cli", "graphs", "probe", "testing", "trace"}

TOP_MODULES_MAX = 10

# Folders of tests that are of no room: of the modules at the package's top level, of how processes
# end, of the tree itself; and tests that need more than Python and g++.
TESTS_BESIDE_ROOMS = {
    "benchmarks",
    "demo",
    "edges",
    "gpu",
    "ground",
    "models",
    "qemu",
    "oracle",
    "simulator",
    "tree",
}
# A name that moved.
ROOMS_WITHOUT_TESTS = {"apps"}

# Lowest first: a header includes from its own room and from those below; "" is outside of rooms.
HEADER_RANK = {
    "base": 0,
    "nvme": 1,
    "cache": 2,
    "array": 3,
    "batch": 3,
    "file": 4,
    "": 5,
    "kernels": 6,
}

# The same for the C++ extension. The CPU device stands below the controllers, of which it knows
# the contract alone.
NATIVE = ROOT / "native"
NATIVE_ROOMS = [
    "base",
    "cuda",
    "io",
    "storage",
    "transfer",
    "checkpoint",
    "nvme",
    "cpu",
    "cpu/policy_kernels",
    "launch",
    "nvme/model",
    "nvme/software",
    "sharing",
    "pipeline",
    "vfio",
    "testing",
    "bind",
]
NATIVE_RANK = {name: rank for rank, name in enumerate(NATIVE_ROOMS)}

# Where the compilers differ, and nowhere else.
# And where a feature is switched at compile time: shared.cuh.
MAY_BRANCH_ON_COMPILER = {
    "shared.cuh",
    "staging.cuh",
    "platform.cuh",
    "atomic.cuh",
    "warp.cuh",
    "block.cuh",
    "assert.cuh",
}
MAY_USE_ASSEMBLY = {"platform.cuh", "atomic.cuh", "warp.cuh", "staging.cuh"}
MAY_INCLUDE_STANDARD_HEADERS = {"platform.cuh", "assert.cuh"}

# With brackets, so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(TO[D]O|FIX[M]E|X[X]X|HA[C]K|WI[P])\b")

LINE_COLUMNS_MAX = 100

python_files = sorted(PACKAGE.rglob("*.py"))
device_files = sorted(PACKAGE.rglob("*.cuh"))
native_files = sorted(
    path
    for folder in (ROOT / "native", ROOT / "tests" / "simulator")
    for path in folder.rglob("*")
    if path.suffix in {".cpp", ".h"}
)
test_files = sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("tests/**/*.cpp")])
BENCH_KINDS = {".py", ".cu", ".cuh", ".cpp"}
bench_files = sorted(
    path for path in (ROOT / "benchmarks").rglob("*") if path.suffix in BENCH_KINDS
)
other_files = [
    ROOT / "Makefile",
    ROOT / "CMakeLists.txt",
    ROOT / "pyproject.toml",
    ROOT / ".ci/run",
]
all_files = [
    *python_files,
    *device_files,
    *native_files,
    *bench_files,
    *test_files,
    *other_files,
]
markdown_files = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def each(paths: list[Path]) -> Callable[[Callable[[Path], None]], Callable[[], None]]:
    """Make one test of a rule, which names all files that break it."""

    def test_of(rule: Callable[[Path], None]) -> Callable[[], None]:
        def test() -> None:
            broken = []
            for path in paths:
                try:
                    rule(path)
                except AssertionError as error:
                    broken.append(f"{name_of(path)}: {error}")
            assert not broken, "\n".join(broken)

        return test

    return test_of


@functools.cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_all_files_that_break_a_rule_are_named() -> None:
    @each([ROOT / "Makefile", ROOT / "README.md", ROOT / "pyproject.toml"])
    def rule(path: Path) -> None:
        assert path.suffix == ".md"

    with pytest.raises(AssertionError, match=r"(?s)Makefile.*pyproject\.toml") as broken:
        rule()
    assert "README" not in str(broken.value)


# Python.


def module_of(path: Path) -> str:
    parts = ("flashwarp", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in python_files}


def imports_of(text: str, *, types: bool = True) -> frozenset[str]:
    """What a source imports, at its top or inside a function; with `types`, for types alone too."""
    always, for_types = _imports_of(text)
    return always | for_types if types else always


@functools.cache
def _imports_of(text: str) -> tuple[frozenset[str], frozenset[str]]:
    found: tuple[set[str], set[str]] = set(), set()
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(text), False)]
    while pending:
        node, is_type = pending.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending += [(each, True) for each in node.body]
            pending += [(each, is_type) for each in node.orelse]
            continue
        if isinstance(node, ast.Import):
            found[is_type].update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            found[is_type].update(f"{node.module}.{alias.name}" for alias in node.names)
        if not isinstance(node, ast.expr):
            pending += [(each, is_type) for each in ast.iter_child_nodes(node)]
    return frozenset(found[0]), frozenset(found[1])


@functools.cache
def needs_of(module: str) -> frozenset[str]:
    """The modules of the package that one imports."""
    found = set()
    for name in imports_of(text_of(MODULES[module])):
        # `from flashwarp.x import y`: y is a module, or a name in x.
        target = name if name in MODULES else name.rpartition(".")[0]
        if target in MODULES and not name.startswith("flashwarp._native"):
            found.add(target)
    return frozenset(found - {module})


def room_of_module(module: str) -> str:
    """The folder that a module lies in; its own name at the package's top level."""
    return (module.split(".") + ["door"])[1]


def check_one_direction(needs: dict[str, set[str]]) -> None:
    """Fail on a circle, and show it."""
    try:
        graphlib.TopologicalSorter(needs).prepare()
    except graphlib.CycleError as error:
        pytest.fail(" needs ".join(reversed(error.args[1])))


def test_rooms_need_each_other_in_one_direction() -> None:
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        rooms = {room_of_module(each) for each in needs_of(module)}
        needs.setdefault(room_of_module(module), set()).update(rooms - {room_of_module(module)})

    check_one_direction(needs)


def test_modules_need_each_other_in_one_direction() -> None:
    check_one_direction({module: set(needs_of(module)) for module in MODULES})


@pytest.mark.parametrize("module", sorted(MODULES))
def test_the_product_needs_no_measurement(module: str) -> None:
    if module != "flashwarp.__main__" and room_of_module(module) not in NO_PRODUCT:
        assert {room_of_module(each) for each in needs_of(module)} & NO_PRODUCT == set()


def test_few_modules_lie_outside_of_rooms() -> None:
    outside = {path.stem for path in python_files if path.parent == PACKAGE}
    outside -= {"__init__", "__main__"}

    assert len(outside) <= TOP_MODULES_MAX, "a room has a place for it"


def test_tests_lie_in_the_rooms_of_the_package() -> None:
    tests = ROOT / "tests"
    rooms = {path.parent.name.lstrip("_") for path in PACKAGE.glob("*/__init__.py")}
    folders = {path.relative_to(tests).parts[0] for path in tests.rglob("test_*.py")}

    assert folders - rooms == TESTS_BESIDE_ROOMS, "a room of the package has a place for it"
    assert rooms - folders == ROOMS_WITHOUT_TESTS, "a room has no tests"


def test_only_what_tests_share_lies_at_their_top() -> None:
    assert [path.name for path in (ROOT / "tests").iterdir() if path.is_file()] == ["conftest.py"]


def test_every_module_is_needed() -> None:
    sources = [*python_files, *test_files, *ROOT.glob("examples/*.py")]
    text = "\n".join(map(text_of, [*sources, ROOT / "pyproject.toml"]))
    needed = set().union(*map(needs_of, MODULES))
    for path in sources:
        if path.suffix == ".py" and path not in python_files:
            for name in imports_of(text_of(path)):
                needed |= {name, name.rpartition(".")[0]}
    needed |= set(re.findall(r"flashwarp\.[a-z_.]+", text))
    # Commands of the command line are imported by their names.
    by_name = {"flashwarp.cli"}
    dead = {
        module
        for module, path in MODULES.items()
        if path.stem not in ("__init__", "__main__")
        and module not in needed
        and module.rpartition(".")[0] not in by_name
    }

    assert dead == set()


@each(python_files)
def test_only_the_calls_of_the_driver_import_cuda(path: Path) -> None:
    imported = {name.split(".")[0] for name in imports_of(text_of(path), types=False)}
    # Modules that may be absent are imported by name.
    imported_by_name = re.search(r"""import\w*\(\s*["']cuda\b""", text_of(path))

    assert path in [
        PACKAGE / "_jit" / f"{name}.py" for name in ("cuda_api", "driver", "nvrtc")
    ] or ("cuda" not in imported and not imported_by_name)


# What a signal handler can leave taken. `flashwarp.endings` has the same without that fault.
LOST_TO_SIGNALS = {
    *("Lock", "RLock", "Condition", "Event", "Semaphore", "BoundedSemaphore", "Barrier", "Timer"),
    *("ThreadPoolExecutor", "Queue", "LifoQueue", "PriorityQueue", "Thread", "as_completed"),
}
LOCKS = re.compile(rf"\b({'|'.join(sorted(LOST_TO_SIGNALS))}|acquire|futures\.wait)\(")
# By file and source: why it is right there.
MAY_BE_LOST = {
    ("endings.py", "threading.RLock()"): "its type is the base of `Lock`",
    ("endings.py", "threading.Lock()"): "of one wait, and taken and given in one native step",
    ("endings.py", "waiter.acquire()"): "nobody else has it yet",
}
# Programs of their own, which a signal ends.
ARE_PROGRAMS = {"probe", "testing"}


def locks_lost_to_signals(text: str) -> Iterator[str]:
    """Yield where a source makes, or takes outside of `with`, what a signal can leave taken."""
    if not LOCKS.search(text):
        return
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        begin, _, last = name.rpartition(".")
        origin = rf"from (threading|queue|concurrent.*) import .*\b{last}\b"
        ours = not begin and not re.search(origin, text)
        origins = ("", "threading", "queue", "concurrent.futures")
        made = last in LOST_TO_SIGNALS and begin in origins and not ours
        waits = name == "concurrent.futures.wait"
        # Other things that are acquired have arguments of their own.
        plain = all(isinstance(each, ast.Constant) for each in node.args)
        taken = bool(begin) and last == "acquire" and plain
        if made or waits or taken:
            yield ast.unparse(node)


@each(python_files)
def test_no_signal_leaves_a_lock_taken(path: Path) -> None:
    if room_of_module(module_of(path)) in ARE_PROGRAMS:
        return
    calls = locks_lost_to_signals(text_of(path))
    found = [each for each in calls if (path.name, each) not in MAY_BE_LOST]

    assert found == [], "take it from `flashwarp.endings`, or say in MAY_BE_LOST why it is right"


def test_locks_that_a_signal_leaves_taken_are_found() -> None:
    source = """
from concurrent.futures import ThreadPoolExecutor
lock, ready, threads = threading.RLock(), threading.Event(), ThreadPoolExecutor(2)
threading.Thread(target=run).start()
turn.acquire(blocking=False)
with lock:
    endings.Thread(run, "name").start()
concurrent.futures.wait(calls)
"""

    found = list(locks_lost_to_signals(source))

    assert sorted(found) == [
        "ThreadPoolExecutor(2)",
        "concurrent.futures.wait(calls)",
        "threading.Event()",
        "threading.RLock()",
        "threading.Thread(target=run)",
        "turn.acquire(blocking=False)",
    ]


def test_import_brings_no_optional_package() -> None:
    script = (
        "import flashwarp, flashwarp.testing, sys; "
        "print(*sorted({name.split('.')[0] for name in sys.modules}), sep='\\n')"
    )

    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )

    # The suites of flashwarp.testing are found by pytest, and need none of it.
    optional = {
        "pytest",
        "hypothesis",
        "obstore",
        "torch",
        "cupy",
        "numba",
        "cuda",
        "matplotlib",
        "scipy",
        "pandas",
    }
    assert optional & set(result.stdout.split()) == set()


def test_import_leaves_everything_for_later() -> None:
    script = (
        "import flashwarp, sys; "
        "ours = {name for name in sys.modules if name.startswith('flashwarp')}; "
        "assert ours == {'flashwarp', 'flashwarp._names'}, ours; "
        "assert 'numpy' not in sys.modules; "
        "assert callable(flashwarp.compile) and 'load' in dir(flashwarp); "
        "assert flashwarp.nvme.SSDModel is vars(flashwarp.nvme)['SSDModel']"
    )

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_first_use_leaves_for_later_what_few_programs_need() -> None:
    later = [
        "flashwarp._jit.compiler",
        "flashwarp._jit.host_compiler",
        "flashwarp.array.advice",
        "flashwarp.array.share_table",
        "flashwarp.cache.shared",
        "flashwarp.checkpoint.checkpointer",
        "flashwarp.nvme.drive_model",
        "flashwarp.program.compiling",
    ]
    script = (
        "import flashwarp, sys; flashwarp.open, flashwarp.Cache; "
        f"assert not set({later}) & set(sys.modules), set({later}) & set(sys.modules)"
    )

    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_the_door_is_small() -> None:
    assert len(flashwarp.__all__) == 14, "a room has a place for it"


@pytest.mark.parametrize("name", sorted(flashwarp.__all__))
def test_public_name_is_documented(name: str) -> None:
    thing = getattr(flashwarp, name)

    if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing):
        assert (vars(thing) if inspect.isclass(thing) else {"__doc__": thing.__doc__}).get(
            "__doc__"
        )
    page = text_of(ROOT / "docs" / "reference.md")
    documented = re.findall(r"^\.\. auto(?:function|class|module):: flashwarp\.(\w+)$", page, re.M)
    assert name in documented, "docs/reference.md leaves it out"


@pytest.mark.parametrize(
    "thing",
    [
        *(flashwarp.Array, flashwarp.Cache, flashwarp.Checkpointer, flashwarp.Future),
        *(flashwarp.program.Kernel, flashwarp.program.Program, flashwarp.array.ShareTable),
    ],
    ids=lambda thing: thing.__name__,
)
def test_public_members_are_documented(thing: type) -> None:
    members = {
        name: member
        for name, member in vars(thing).items()
        if not name.startswith("_") and (inspect.isroutine(member) or isinstance(member, property))
    }

    assert members
    assert [name for name, member in members.items() if not member.__doc__] == []


def test_public_names_are_sorted_and_exist() -> None:
    assert list(flashwarp.__all__) == sorted(flashwarp.__all__)
    assert all(hasattr(flashwarp, name) for name in flashwarp.__all__)


def test_every_error_is_public_and_one_of_ours() -> None:
    errors = importlib.import_module("flashwarp.errors")
    defined = {
        name
        for name, thing in vars(errors).items()
        if inspect.isclass(thing) and thing.__module__ == errors.__name__
    }

    assert defined == set(errors.__all__)
    assert all(issubclass(getattr(errors, name), errors.FlashwarpError) for name in defined)


# Device headers.


def room_of(path: Path) -> str:
    if HEADERS not in path.parents:
        return "kernels"
    inside = path.relative_to(HEADERS).parts
    return inside[0] if len(inside) > 1 else ""


def includes(path: Path) -> list[str]:
    """As written, with its brackets or quotes."""
    return re.findall(r'^\s*#\s*include\s+([<"][^>"]+[>"])', text_of(path), re.MULTILINE)


@each(device_files)
def test_no_header_includes_a_higher_one(path: Path) -> None:
    mine = HEADER_RANK[room_of(path)]

    for spelling in includes(path):
        if spelling.startswith("<"):
            assert path.name in MAY_INCLUDE_STANDARD_HEADERS, f"{spelling}: NVRTC has none"
            continue
        name = spelling.strip('"')
        beside = path.parent / name
        target = beside if beside.exists() else PACKAGE / "include" / name
        assert target.exists(), f"{name} does not exist"
        assert beside.exists() == (room_of(path) == "kernels" and target.parent == path.parent), (
            "headers are spelled from the include root, kernels that lie together by their name"
        )
        assert HEADER_RANK[room_of(target)] <= mine, f"{path.name} includes {name}, above it"


@each([path for path in native_files if NATIVE in path.parents])
def test_no_native_file_includes_a_higher_room(path: Path) -> None:
    mine = NATIVE_RANK[path.parent.relative_to(NATIVE).as_posix()]

    for spelling in includes(path):
        name = spelling.strip('"')
        if spelling.startswith("<") or name.startswith("flashwarp/"):
            continue
        target = NATIVE / name
        assert target.exists(), f"{name} is not spelled from native/"
        room = target.parent.relative_to(NATIVE).as_posix()
        assert NATIVE_RANK[room] <= mine, f"{path.name} includes {name}, above it"


@each(device_files)
def test_compilers_differ_in_few_places(path: Path) -> None:
    code = re.sub(r"//.*", "", text_of(path))
    conditions = re.findall(r"^\s*#\s*(?:if|ifdef|ifndef)\b.*", code, re.MULTILINE)
    # Which kernels a program has is its own choice, and no compiler's.
    conditions = [each for each in conditions if not re.search("FW_(BUILDS|ALL_KERNELS)", each)]

    assert conditions == [] or path.name in MAY_BRANCH_ON_COMPILER
    assert not re.search(r"\basm\b", code) or path.name in MAY_USE_ASSEMBLY


@each(device_files)
def test_header_may_be_included_twice(path: Path) -> None:
    assert "#pragma once" in text_of(path)


# All sources.


def test_no_native_file_leaves_the_limited_api() -> None:
    # From Python 3.12 on the extension is compiled for it, and older versions of Python do not
    # notice what is not part of it.
    preprocessed = subprocess.run(
        ["g++", "-E", "-dD", "-x", "c++", "-DPy_LIMITED_API=0x030C0000", "-"],
        input=f"#include <{sysconfig.get_path('include')}/Python.h>",
        capture_output=True,
        text=True,
        check=True,
    )
    # What a macro stands for need not exist: PyStructSequence_GET_ITEM names what only others have.
    declared = re.sub(r"(?m)^(#define \w+).*", r"\1", preprocessed.stdout)
    limited = set(re.findall(r"\w+", declared))

    for path in native_files:
        code = re.sub(r"//.*", "", path.read_text())
        assert set(re.findall(r"\b_?Py[A-Za-z]*_\w+", code)) <= limited, path.name


@each([*python_files, *device_files, *native_files, *bench_files])
def test_file_opens_with_its_promise(path: Path) -> None:
    if path.suffix == ".cpp" and path.with_suffix(".h").exists():
        return  # the header says it
    text = text_of(path)

    if path.suffix == ".py":
        assert re.match(r'(#.*\n)*r?"""\S', text)
    else:
        assert text.removeprefix("#pragma once").lstrip().startswith("//")


@each([*all_files, *markdown_files])
def test_nothing_is_left_to_do(path: Path) -> None:
    found = [line for line in text_of(path).splitlines() if LEFTOVERS.search(line)]

    assert found == []


@each(all_files)
def test_lines_are_short(path: Path) -> None:
    lines = text_of(path).splitlines()
    long = [number for number, line in enumerate(lines, 1) if len(line) > LINE_COLUMNS_MAX]

    assert long == []


@each([*all_files, *markdown_files])
def test_text_is_clean(path: Path) -> None:
    text = text_of(path)

    assert "\t" not in text or path.name == "Makefile"
    assert "\r" not in text
    assert text.endswith("\n") or text == ""
    assert not re.search(r"[ \t]+$", text, re.MULTILINE)


# Markdown.


def prose_of(path: Path) -> list[tuple[int, str]]:
    """The numbered lines outside of fenced code."""
    lines, fenced = [], False
    for number, line in enumerate(text_of(path).splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not fenced:
            lines.append((number, line))
    assert not fenced, f"{path.name}: a code block has no end"
    return lines


def anchors_of(path: Path) -> set[str]:
    """The anchors of a page's headings, as the code host and Sphinx make them."""
    headings = [line.lstrip("#") for _, line in prose_of(path) if line.startswith("#")]
    return {
        re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings
    }


@each(markdown_files)
def test_markdown_lines_are_short(path: Path) -> None:
    long = [
        number
        for number, line in prose_of(path)
        if len(line) > LINE_COLUMNS_MAX and not line.startswith("|") and "](" not in line
    ]

    assert long == []


@each(markdown_files)
def test_markdown_reads_on_the_code_host(path: Path) -> None:
    # Directives stand in fences; roles of Sphinx would be shown as they are written.
    roles = [
        number for number, line in prose_of(path) if re.search(r"(?:^|[\s(])\{[\w:-]+\}`", line)
    ]

    assert roles == [], "write a link, [Files](files.md), in place of a role"


@each(markdown_files)
def test_markdown_links_lead_somewhere(path: Path) -> None:
    prose = "\n".join(line for _, line in prose_of(path))

    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        target, _, anchor = link.partition("#")
        page = path.parent / target if target else path
        if "://" not in link:
            assert page.exists(), f"{path.name} links to {link}"
            assert not anchor or anchor in anchors_of(page), f"{path.name} links to {link}"


@each(sorted(ROOT.glob("docs/*.md")))
def test_page_is_in_the_contents(path: Path) -> None:
    contents = text_of(ROOT / "docs" / "index.md")
    page = path.stem

    assert page == "index" or (f"]({page}.md)" in contents and f"\n{page}\n" in contents)
