"""One word for one thing: names in the code use these words in their rooms alone.

The glossary has their meanings. Names are read, not comments and texts, because English has other
uses for them.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

HEADERS = "src/flashwarp/include/flashwarp"
TORCH = "src/flashwarp/interop/torch"

# By word: the files and folders where names have it.
ROOMS = {
    # A number that is taken in turn.
    "ticket": [
        *(f"{HEADERS}/{each}" for each in ("nvme", "cache", "batch", "batch.cuh", "batch_abi.cuh")),
        "src/flashwarp/kernels/maintenance.cuh",
        "src/flashwarp/nvme/queue_pair.py",
        *("src/flashwarp/pipeline", "src/flashwarp/interop/numba/batches.py"),
        *("native/pipeline", "native/bind/pipeline.cpp", "native/bind/layouts.cpp"),
    ],
    # A place for a line in its set.
    "way": [
        *(f"{HEADERS}/{each}" for each in ("cache", "array")),
        *("src/flashwarp/kernels", "src/flashwarp/cache"),
        *("src/flashwarp/array/opening.py", "src/flashwarp/array/share_table.py"),
        *("src/flashwarp/trace", "src/flashwarp/cli/trace.py", "src/flashwarp/cli/serve.py"),
        *("src/flashwarp/graphs/rows.py", f"{TORCH}/offloading/plan.py"),
        "native/bind/layouts.cpp",
    ],
    # One thread of a warp.
    "lane": [
        *(HEADERS, "src/flashwarp/kernels", f"{TORCH}/sampling.cu"),
        "src/flashwarp/cache/volume.py",
        *("src/flashwarp/table/lookup.py", "native/base/fault_guard.cpp"),
        "native/bind/layouts.cpp",
    ],
    # Rows that one call of a pipeline moves, and what a training loop takes at a time.
    "batch": [
        *(f"{HEADERS}/{each}" for each in ("batch", "batch.cuh", "batch_abi.cuh")),
        *("src/flashwarp/pipeline", "native/pipeline", "native/bind/pipeline.cpp"),
        "native/bind/layouts.cpp",
        *("src/flashwarp/interop/c_abi.py", "src/flashwarp/interop/numba"),
        *(f"{TORCH}/loader.py", f"{TORCH}/sampling.py"),
    ],
}

# Turns of English.
IDIOMS = {"both_ways", "make_way", "on_their_way", "under_way", "_under_way", "_WAY_OUT"}

# By file: names of others.
EXCEPTIONS = {
    "native/bind/tensors.cpp": {"lanes"},  # a field of DLPack
    # cuMemcpyBatchAsync
    "native/cuda/context.cpp": {
        *("kBatchVersion", "memcpy_batch", "batch_refused", "batch", "copies_batches")
    },
    "native/cuda/context.h": {"copies_batches"},
    "native/bind/cuda.cpp": {"copies_batches"},
    "src/flashwarp/_jit/cuda_context.py": {"copies_batches"},
}

NOT_CODE = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|^\s*#\s*include[^\n]*', re.DOTALL | re.MULTILINE
)


NOT_PYTHON = re.compile(
    r"""\#[^\n]* | (\"{3}|'{3}).*?\1 | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.VERBOSE,
)


def names_in(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Yield the names in code, with their lines."""
    not_code = NOT_PYTHON if path.endswith(".py") else NOT_CODE
    code = not_code.sub(lambda found: "\n" * found[0].count("\n"), text)
    for number, line in enumerate(code.split("\n"), 1):
        for name in re.findall(r"[A-Za-z_]\w*", line):
            yield number, name


@functools.cache
def words_of(name: str) -> frozenset[str]:
    """Split a name such as `kBatchMax`, `batch_` or `two_batches`."""
    return frozenset(part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name))


def has(name: str, word: str) -> bool:
    """Whether a word, or its plural, is a part of a name."""
    return not words_of(name).isdisjoint((word, f"{word}s", f"{word}es"))


@functools.cache
def found() -> dict[str, dict[str, list[tuple[int, str]]]]:
    """Return the names that have each word, by word and file."""
    kinds = {".py", ".h", ".cpp", ".cuh", ".cu"}
    files = (each for room in ("src", "native") for each in (ROOT / room).rglob("*"))
    result: dict[str, dict[str, list[tuple[int, str]]]] = {word: {} for word in ROOMS}
    for file in sorted(each for each in files if each.suffix in kinds):
        path = str(file.relative_to(ROOT))
        for number, name in names_in(path, file.read_text()):
            for word, where in result.items():
                if has(name, word):
                    where.setdefault(path, []).append((number, name))
    return result


def lies_in(path: str, room: str) -> bool:
    return path == room or path.startswith(f"{room}/")


@pytest.mark.parametrize("word", ROOMS)
def test_a_word_stays_in_its_rooms(word: str) -> None:
    strays = [
        f"{path}:{number}: {name}"
        for path, names in found()[word].items()
        if not any(lies_in(path, room) for room in ROOMS[word])
        for number, name in names
        if name not in EXCEPTIONS.get(path, set()) | IDIOMS
    ]

    assert not strays, f"{word} means one thing, which these do not:\n" + "\n".join(strays)


@pytest.mark.parametrize("word", ROOMS)
def test_every_room_has_its_word(word: str) -> None:
    idle = [room for room in ROOMS[word] if not any(lies_in(path, room) for path in found()[word])]

    assert not idle, f"no name there has {word}"


def test_every_exception_is_needed() -> None:
    names: dict[str, set[str]] = {}
    for where in found().values():
        for path, here in where.items():
            names.setdefault(path, set()).update(name for _, name in here)

    assert set().union(*names.values()) >= IDIOMS
    for path, allowed in EXCEPTIONS.items():
        assert allowed <= names[path], f"{path} has no {allowed - names[path]}"


def test_words_are_found_in_names_alone() -> None:
    python = "# a way\nways = 'lane'\nKernelBatches()\nalways = 1\n"
    native = 'int kBatchMax = 1;  // a lane\n/* way\n*/ f("ticket", last_way_);\n'

    assert [each for each in names_in("x.py", python) if has(each[1], "way")] == [(2, "ways")]
    assert [name for _, name in names_in("x.py", python) if has(name, "batch")] == ["KernelBatches"]
    assert [each for each in names_in("x.h", native) if has(each[1], "way")] == [(3, "last_way_")]
    assert [name for _, name in names_in("x.h", native) if has(name, "batch")] == ["kBatchMax"]
    for word in ("lane", "ticket"):
        assert not any(
            has(name, word) for _, name in [*names_in("x.py", python), *names_in("x.h", native)]
        )
