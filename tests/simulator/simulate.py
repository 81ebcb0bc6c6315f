"""Device code and the controller under a seeded scheduler: every interleaving from one number.

The device headers and the controller's own sources are compiled by g++ into a program in which
lanes and controllers take turns as a seed decides; see docs/testing.md. What is compiled is kept
in the cache folder, under a key of everything that went into it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from flashwarp._jit import private_folder
from flashwarp._jit.artifact_cache import content_key, default_directory
from flashwarp.errors import ArgumentError, CompileError
from flashwarp.policy import POLICIES
from simulator.mutants import MUTANTS, Mutant

_log = logging.getLogger(__name__)

__all__ = ["Simulation", "simulate"]

_SIMULATOR = Path(__file__).resolve().parent
# The sources of the checkout, also where an installed package is imported.
_CHECKOUT = _SIMULATOR.parents[1]
_INCLUDE = _CHECKOUT / "src" / "flashwarp" / "include"
_NATIVE = _CHECKOUT / "native"
_WIDTHS = (1, 4, 32)
_MODES = ("any", "sc", "weak")
_STRATEGIES = ("any", "random", "priority", "round-robin", "rival", "exhaustive")

# The compiler's option for each.
_POLICIES = {name: policy.options for name, policy in POLICIES.items()}
_POLICIES["hostile"] = (
    "-include",
    str(_SIMULATOR / "hostile.h"),
    "-DFW_POLICY=::fw::simulator::hostile_policy",
)

_RUNTIME = ("context", "scheduler", "memory", "disk", "history", "main")
_CONTROLLER = (
    "nvme/software/queue_server",
    "nvme/software/rings",
    "nvme/software/command_memory",
    "nvme/software/completions",
    "nvme/software/commands",
    "nvme/software/in_flight",
    "io/nvme_command",
    "nvme/software/identify",
    "nvme/model/ssd_model",
    "storage/storage",
)
_FLAGS = ("-std=c++20", "-g1", "-Wall", "-Wextra", "-DFW_SIMULATOR")
# The runtime is compiled once; scenarios are compiled often and run for seconds, a mutant of one of
# them for a tenth of a second. With warps, `active` must stand in its callers, as on a GPU: in one
# function for all, lanes at different places would meet there, and every mutant would be found.
_RUNTIME_LEVEL = "-O2"
_SCENARIO_LEVEL = "-O1"
_MUTANT_LEVEL = "-O0"
# Objects and programs kept, about 1 MB each; the oldest go first.
_KEPT_MAX = 200
# A program that does not come back is a bug of ours: its steps are bounded.
_GRACE_S = 60.0


@dataclass(frozen=True)
class Simulation:
    """What a simulation has done.

    Attributes
    ----------
    ok : bool
        Whether every schedule kept every promise.
    schedules, points, accesses : int
        Runs; decisions who goes on; accesses to shared memory, decisions included.
    seconds : float
        Spent running, without compiling.
    exhausted : bool
        Whether the strategy was ``exhaustive`` and no schedule is left.
    schedule_hash : str
        Of all decisions: equal for equal runs.
    failure : str
        The report of the first failure, or an empty string.
    replay : str
        The shell command that repeats the failing schedule, or an empty string.
    """

    ok: bool
    schedules: int
    points: int
    accesses: int
    seconds: float
    exhausted: bool
    schedule_hash: str
    failure: str = ""
    replay: str = ""

    @property
    def failing_seed(self) -> int:
        """The seed of the failure; ValueError where there is none."""
        words = self.replay.split()
        return int(words[words.index("--seeds") + 1].partition(":")[0])

    @property
    def points_per_second(self) -> float:
        """Scheduling decisions a second."""
        return self.points / self.seconds if self.seconds > 0 else 0.0


def simulate(
    source: str | os.PathLike[str] | None = None,
    *,
    scenario: str = "",
    width: int = 1,
    mode: str = "any",
    strategy: str = "any",
    seeds: tuple[int, int] = (0, 1000),
    seconds: float | None = None,
    faults: str = "",
    preemptions: int = 2,
    policy: str = "clock",
    mutant: str = "",
    trace: bool = False,
) -> Simulation:
    """Run scenarios under the simulator until a seed fails or the budget is spent.

    Blocks; compiles first where nothing fitting is in the cache, which needs g++ 12 or later.

    Parameters
    ----------
    source : path, optional
        A C++ file with your own scenarios (``FW_SCENARIO``), in place of the built-in ones.
    scenario : str
        The scenario to run; default all, in turn.
    width : int
        Lanes of a warp: 1, 4 or 32.
    mode : str
        ``"sc"``, ``"weak"`` (see docs/testing.md) or ``"any"``: the seed chooses.
    strategy : str
        ``"random"``, ``"priority"``, ``"round-robin"``, ``"rival"``, ``"exhaustive"`` or
        ``"any"``: the seed chooses among the first four.
    seeds : (int, int)
        The first seed, and the one after the last.
    seconds : float, optional
        Budget; the seed at hand is finished. Default: all seeds.
    faults : str
        What fails, as ``"errors=5,delay=20"``; default as the scenario and the seed have it.
    preemptions : int
        Bound of the exhaustive strategy.
    policy : str
        The replacement policy of every cache: one of those in docs/caches.md; your own as
        ``"FILE:TYPE"``, a C++ header and the struct in it; or ``"hostile"``, which breaks every
        rule it can.
    mutant : str
        A deliberate mistake from `simulator.mutants` to compile in.
    trace : bool
        Print every event to standard output.

    Returns
    -------
    Simulation
        Also for a failure, with its report and the command that replays it.

    Raises
    ------
    ArgumentError
        An option that does not exist.
    CompileError
        g++ is missing, or did not accept the source.

    Examples
    --------
    >>> from simulator.simulate import simulate
    >>> simulate(scenario="ring", seeds=(0, 10)).ok  # doctest: +SKIP
    True
    """
    _check("width", width, _WIDTHS)
    _check("mode", mode, _MODES)
    _check("strategy", strategy, _STRATEGIES)
    if mutant:
        _check("mutant", mutant, sorted(MUTANTS))
    program = build_program(
        None if source is None else Path(source),
        width=width,
        mutant=MUTANTS.get(mutant),
        policy=policy,
        # The built-in program has them all; one with something else in it is built for the case.
        scenario=MUTANTS[mutant].scenario if mutant else scenario if policy != "clock" else "",
    )
    command = [str(program), "--mode", mode, "--strategy", strategy]
    command += ["--seeds", f"{seeds[0]}:{seeds[1]}", "--preemptions", str(preemptions)]
    if scenario:
        command += ["--scenario", scenario]
    if seconds is not None:
        command += ["--seconds", str(seconds)]
    if faults:
        command += ["--faults", faults]
    if trace:
        command.append("--trace")
    limit = None if seconds is None else seconds + _GRACE_S
    return _result(_output_of(command, limit), source, policy, mutant, trace)


def run_seeds(program: Path, seeds: tuple[int, int]) -> Simulation:
    """Run all scenarios of a program that `build_program` has made, up to the first failure."""
    command = [str(program), "--seeds", f"{seeds[0]}:{seeds[1]}"]
    return _result(_output_of(command, None), None, "clock", "", False)


def _output_of(command: Sequence[str], limit_s: float | None) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    if done.returncode == 2:
        raise ArgumentError(done.stderr.strip())
    if done.returncode not in (0, 1):
        raise RuntimeError(
            f"the simulator ended with {done.returncode}: {shlex.join(command)}\n"
            f"{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return done.stdout


def scenarios(source: str | os.PathLike[str] | None = None) -> str:
    """List the scenarios of a source, or the built-in ones, a line each."""
    program = build_program(None if source is None else Path(source), width=1)
    return subprocess.run(
        [str(program), "--list"], capture_output=True, text=True, check=True
    ).stdout


def _check(name: str, value: object, known: Sequence[object]) -> None:
    if value not in known:
        raise ArgumentError(f"{name} {value!r}: choose from {', '.join(map(str, known))}")


def _result(
    output: str, source: str | os.PathLike[str] | None, policy: str, mutant: str, trace: bool
) -> Simulation:
    *report, last = output.splitlines()
    if trace:
        print("\n".join(report))
    numbers = json.loads(last)
    failure, replay = "", ""
    if not numbers["ok"]:
        start = next(i for i, line in enumerate(report) if line.startswith("FAILED "))
        options = report[-1].removeprefix("replay: ")
        replay = f"python tests/simulator {options}"
        if source is not None:
            replay += f" --source {shlex.quote(str(source))}"
        if policy != "clock":
            replay += f" --policy {shlex.quote(policy)}"
        if mutant:
            replay += f" --mutant {mutant}"
        failure = "\n".join([*report[start:-1], f"replay: {replay}"])
    return Simulation(
        ok=numbers["ok"],
        schedules=numbers["schedules"],
        points=numbers["points"],
        accesses=numbers["accesses"],
        seconds=numbers["seconds"],
        exhausted=numbers["exhausted"],
        schedule_hash=numbers["hash"],
        failure=failure,
        replay=replay,
    )


# From sources to a program.


def build_program(
    source: Path | None,
    *,
    width: int,
    mutant: Mutant | None = None,
    policy: str = "clock",
    scenario: str = "",
    flags: Sequence[str] = (),
) -> Path:
    """Compile and link a program, or find it in the cache. Any number of callers at a time.

    With a scenario, what belongs to others is left out.
    """
    if source is not None:
        sources = [source.resolve()]
        if not source.exists():
            raise ArgumentError(f"{source} does not exist")
    else:
        every = _scenario_sources()
        sources = [path for path in every if f"({scenario}," in _text(path)] or every
    headers = _header_digest()
    changed = "" if mutant is None else mutated_text(mutant)
    policy_options, policy_text = _policy(policy)
    level = _SCENARIO_LEVEL if mutant is None or width > 1 else _MUTANT_LEVEL
    key = content_key(
        _compiler().encode(),
        headers,
        *(path.read_bytes() for path in sources),
        f"{level} {width} {flags} {policy} {policy_text} {changed}".encode(),
    )
    program = _directory() / f"program-{key[:32]}"
    if program.exists():
        return program
    objects = _runtime_objects(headers, flags)
    with tempfile.TemporaryDirectory() as folder:
        includes = _includes()
        if mutant is not None:
            includes = [_copy_with(mutant, changed, Path(folder)), *includes]
        options = [*_FLAGS, level, *flags, f"-DFW_WARP_WIDTH={width}", *policy_options]
        built = Path(folder) / "scenarios.o"
        _compile_all([(_as_one(sources, built), built)], [*options, *includes])
        linked = Path(folder) / "program"
        _run_compiler([*flags, *map(str, [built, *objects]), "-o", str(linked)])
        _publish(linked, program)
    return program


def _policy(policy: str) -> tuple[Sequence[str], str]:
    """Give the compiler's options that choose a policy, and the text of a header of the user's."""
    header, colon, name = policy.partition(":")
    if not colon:
        _check("policy", policy, [*sorted(_POLICIES), "FILE:TYPE"])
        return _POLICIES[policy], ""
    path = Path(header).resolve()
    if not path.exists():
        raise ArgumentError(f"policy {policy!r}: {path} does not exist")
    options = ("-include", "flashwarp/cache/policy.cuh", "-include", str(path))
    return (*options, f"-DFW_POLICY={name}"), _text(path)


def mutated_text(mutant: Mutant) -> str:
    """Give the mutant's header with its passage replaced, which must occur exactly once."""
    path = _INCLUDE / mutant.header
    text = _text(path if path.exists() else _beside(mutant.header))
    count = text.count(mutant.old)
    if count != 1:
        raise ArgumentError(
            f"mutant {mutant.name}: its passage occurs {count} times in {mutant.header}, not once; "
            "the header has changed, so change the mutant in tests/simulator/mutants"
        )
    return text.replace(mutant.old, mutant.new)


def _beside(header: str) -> Path:
    """Where a header lies that is in no include folder: kernels', or a benchmark's."""
    return _CHECKOUT / (header if header.startswith("benchmarks/") else f"src/{header}")


def _copy_with(mutant: Mutant, text: str, folder: Path) -> Path:
    """Copy the include folder, with the mutant's header in place of ours."""
    copy = folder / "include"
    shutil.copytree(_INCLUDE, copy)
    if not (_INCLUDE / mutant.header).exists():
        # A header of kernels includes others by their bare names.
        folder_of_header = Path(mutant.header).parent
        headers_only = shutil.ignore_patterns("*.py", "*.cu", "__pycache__")
        shutil.copytree(_beside(mutant.header).parent, copy / folder_of_header, ignore=headers_only)
    (copy / mutant.header).write_text(text, encoding="utf-8")
    return copy


def _scenario_sources() -> list[Path]:
    return sorted((_SIMULATOR / "scenarios").glob("*.cpp"))


def _controller_sources() -> list[Path]:
    return [_NATIVE / f"{name}.cpp" for name in _CONTROLLER]


def _directory() -> Path:
    """Where built simulators are kept, which are run later: never where others may write."""
    chosen = os.environ.get("FLASHWARP_CACHE_DIR")
    default = default_directory()
    parent = Path(chosen) if chosen else default and default.parent
    if parent is None:
        return _process_folder("there is no home folder")
    directory = parent.absolute() / "simulator"
    try:
        with private_folder.opened(directory, create=True):
            return directory
    except (OSError, private_folder.UnsafeFolderError) as error:
        return _process_folder(f"the folder {directory} is not used: {error}")


@functools.cache
def _process_folder(why: str) -> Path:
    _log.warning("simulators are built for this process only: %s", why)
    folder = tempfile.mkdtemp(prefix="flashwarp-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _header_digest() -> bytes:
    """Everything that a scenario may include."""
    files = [
        *(_CHECKOUT / "src" / "flashwarp").rglob("*.cuh"),
        *(_CHECKOUT / "benchmarks").rglob("*.cuh"),
        *_SIMULATOR.glob("*.h"),
        *_SIMULATOR.glob("*.cpp"),
        *_NATIVE.rglob("*.h"),
        *_controller_sources(),
    ]
    return content_key(*(path.read_bytes() for path in sorted(files))).encode()


def _includes() -> list[str | Path]:
    # Kernels are included as flashwarp/kernels/... and benchmarks/..., the simulator's headers as
    # simulator/....
    return [_INCLUDE, _CHECKOUT / "src", _CHECKOUT, _NATIVE, _SIMULATOR.parent]


def _runtime_objects(headers: bytes, flags: Sequence[str]) -> list[Path]:
    """The simulator's and the controller's objects, which are the same at every width."""
    key = content_key(_compiler().encode(), headers, f"{flags}".encode())[:32]
    parts = {
        "runtime": [_SIMULATOR / f"{name}.cpp" for name in _RUNTIME],
        "controller": _controller_sources(),
    }
    objects = {_directory() / f"{name}-{key}.o": sources for name, sources in parts.items()}
    with tempfile.TemporaryDirectory() as folder:
        missing = {final: Path(folder) / final.name for final in objects if not final.exists()}
        _compile_all(
            [(_as_one(objects[final], new), new) for final, new in missing.items()],
            [*_FLAGS, _RUNTIME_LEVEL, *flags, *_includes()],
        )
        for final, new in missing.items():
            _publish(new, final)
    return list(objects)


def _as_one(sources: Sequence[Path], target: Path) -> Path:
    """Give one source that has them all, beside what it becomes: headers are compiled once."""
    if len(sources) == 1:
        return sources[0]
    together = target.with_suffix(".cpp")
    together.write_text("".join(f'#include "{path}"\n' for path in sources), encoding="utf-8")
    return together


def _publish(new: Path, final: Path) -> None:
    """Move a file into the cache at once: whoever sees it sees all of it."""
    handle, temporary = tempfile.mkstemp(dir=final.parent)
    os.close(handle)
    shutil.copy2(new, temporary)
    try:
        Path(temporary).replace(final)
    except OSError:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
    kept = sorted(final.parent.iterdir(), key=_time_of, reverse=True)
    for old in kept[_KEPT_MAX:]:
        old.unlink(missing_ok=True)


def _time_of(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _compile_all(pairs: Iterable[tuple[Path, Path]], options: Sequence[str | Path]) -> None:
    arguments = [f"-I{option}" if isinstance(option, Path) else option for option in options]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        jobs = [
            pool.submit(_run_compiler, [*arguments, "-c", str(source), "-o", str(target)])
            for source, target in pairs
        ]
        for job in jobs:
            job.result()


@functools.cache
def _compiler() -> str:
    """The version of g++ that is found; part of every key."""
    found = shutil.which("g++")
    if found is None:
        raise CompileError("the simulator needs g++ 12 or later, and there is no g++")
    return subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout


def _run_compiler(arguments: Sequence[str]) -> None:
    done = subprocess.run(["g++", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CompileError(f"g++ failed:\n{done.stderr[:4000]}", done.stderr)


def coverage_program(folder: Path, width: int) -> Path:
    """Build the built-in scenarios in `folder` with gcov's counters, which stay there."""
    options = [*_FLAGS, "-O0", "--coverage", f"-DFW_WARP_WIDTH={width}", *_includes()]
    sources = _scenario_sources()
    objects = [folder / f"{path.stem}.o" for path in sources]
    _compile_all(zip(sources, objects, strict=True), options)
    runtime = _runtime_objects(_header_digest(), ())
    program = folder / "program"
    _run_compiler(["--coverage", *map(str, [*objects, *runtime]), "-o", str(program)])
    return program
