"""`compile`: users' kernels in CUDA C++, for a GPU or the CPU device.

The same text runs on both. A kernel's mangled name has the types of its parameters, so each launch
checks its arguments. A `flashwarp.Array` becomes an `fw::array<T>` by value.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flashwarp import _native, endings
from flashwarp import device as devices
from flashwarp._jit import spelling
from flashwarp._jit.compiler import INCLUDE_DIR, KernelResources, Source
from flashwarp._jit.program import LoadedKernel, LoadedProgram
from flashwarp.array.array import Array
from flashwarp.array.turns import in_turns
from flashwarp.cache.cache import Cache
from flashwarp.config import integer
from flashwarp.device import Device
from flashwarp.errors import ArgumentError, CompileError
from flashwarp.launch.order import in_order
from flashwarp.policy import CLOCK, Policy, resolve_policy
from flashwarp.program.arguments import Launch, accesses_of, parse_signature
from flashwarp.program.hints import explained
from flashwarp.storage import files

_REGISTER_LIMIT = "--maxrregcount=64"
_WARPS_MAX = (1 << 31) - 1

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*\Z")

Define = str | int | float | bool | None


def compile(  # noqa: A001 - the module's one verb
    source: str | Path,
    device: object = None,
    *,
    options: Sequence[str] = (),
    defines: Mapping[str, Define] | None = None,
    include_dirs: Sequence[str | Path] = (),
    policy: str | Policy = CLOCK,
    debug: bool = False,
) -> Program:
    """Compile kernels written in CUDA C++ for a device, and load them.

    Parameters
    ----------
    source : str or Path
        The text, or the path of a file. A file may include headers from its folder.
    device : Device or str, optional
        "cpu", "cuda", "cuda:N". Default: "cuda:0" if a GPU works, else "cpu".
    options : sequence of str
        More options for the compiler: NVRTC's on a GPU, those of g++ or clang++ on the CPU device.
        On a GPU, kernels without launch bounds have 64 registers by default, as those of FW_KERNEL;
        ``"--maxrregcount=N"`` is another limit.
    defines : mapping, optional
        Macros and their values; None defines a macro without a value.
    include_dirs : sequence of str or Path
        Folders with more headers. The headers of flashwarp are always found.
    policy : str or Policy
        The replacement policy of the caches that the kernels' arrays use; see `Cache`.
    debug : bool
        Check assertions in kernels, and keep line numbers.

    Returns
    -------
    Program
        The loaded kernels. They stay loaded until the device is closed.

    Raises
    ------
    CompileError
        With the compiler's message, which names lines of `source`; or when there is no compiler.
        The CPU device needs g++, clang++ or what `CXX` names. A GPU needs no CUDA toolkit.

    Notes
    -----
    Blocks for some seconds the first time. Later, on the CPU device, it blocks for a tenth of a
    second, for the preprocessor. Compiled code is kept on disk under a key of all its inputs, in a
    folder that only you can write to. If there is no such folder, it is kept in memory for this
    process.

    Examples
    --------
    >>> import flashwarp as fw, numpy as np
    >>> program = fw.compile('''
    ... #include "flashwarp/array.cuh"
    ... FW_KERNEL halve(fw::array<float> x, uint64_t n) {
    ...   const uint64_t step = fw::base::thread_count();
    ...   for (uint64_t i = fw::base::thread_index(); i < n; i += step) x.store(i, x[i] / 2);
    ... }
    ... ''', device="cpu")
    >>> with fw.create("numbers.npy", "float32", 1000, device="cpu") as x:
    ...     x[:] = 3
    ...     program["halve"](x, 10)
    ...     x.wait()
    ...     x[8:12].tolist()
    [1.5, 1.5, 3.0, 3.0]
    """
    where = devices.resolve(device)
    chosen = resolve_policy(policy)
    written = _source(source)
    folders = [Path(files.check_name(folder)) for folder in _listed(include_dirs)]
    others = (*_define_options(defines), *_strings("options", options))
    if where.kind == "cuda" and not any("maxrregcount" in each for each in others):
        others = (_REGISTER_LIMIT, *others)

    def load(policy: Policy) -> LoadedProgram:
        every = (*policy.options, *others)
        try:
            return where.load_program(
                written.behind(policy), include_dirs=folders, options=every, debug=debug
            )
        except CompileError as error:
            raise explained(error, written.text.decode(errors="replace")) from None

    def for_clients() -> Program:
        return Program(where, load(chosen.for_clients), chosen)

    return Program(where, load(chosen), chosen, functools.cache(for_clients))


def get_include() -> str:
    """Return the folder of the device headers, for compilers other than `compile`.

    Examples
    --------
    >>> import flashwarp as fw, pathlib
    >>> (pathlib.Path(fw.get_include()) / "flashwarp" / "array.cuh").exists()
    True
    """
    return str(INCLUDE_DIR)


def _source(source: str | Path) -> Source:
    if isinstance(source, Path):
        return Source.read(source)
    if not isinstance(source, str):
        raise ArgumentError(
            f"the source is a str with the code or a pathlib.Path, not {type(source).__name__}"
        )
    if source.endswith((".cu", ".cuh", ".cpp")) and "\n" not in source:
        raise ArgumentError(
            f"the source {source!r} is code: for a file give pathlib.Path({source!r})"
        )
    return Source("program.cu", source.encode())


def _listed(folders: Sequence[str | Path]) -> Sequence[str | Path]:
    if not isinstance(folders, Sequence) or isinstance(folders, str | bytes):
        raise ArgumentError(f"include_dirs={folders!r} is not a sequence of paths")
    return folders


def _strings(what: str, values: Sequence[str]) -> tuple[str, ...]:
    listed = isinstance(values, Sequence) and not isinstance(values, str)
    if not listed or not all(isinstance(value, str) for value in values):
        raise ArgumentError(f"{what} is a sequence of strings, not {values!r}")
    return tuple(values)


def _named(policy: Policy) -> str:
    return repr(policy if policy.shared_by_gpus else policy.name)


def _define_options(defines: Mapping[str, Define] | None) -> list[str]:
    options: list[str] = []
    if defines is None:
        return options
    if not isinstance(defines, Mapping):
        raise ArgumentError(f"defines={defines!r} is not a mapping of macros to their values")
    for name, value in defines.items():
        if not isinstance(name, str) or not _IDENTIFIER.match(name):
            raise ArgumentError(f"a macro cannot be named {name!r}")
        text = int(value) if isinstance(value, bool) else value
        options.append(f"-D{name}" if value is None else f"-D{name}={text}")
    return options


class Program(endings.NotCopied):
    """Compiled kernels of one source. Made by `compile`.

    Attributes
    ----------
    device : Device
        Where they run.
    policy : Policy
        The policy of the caches of the arrays that they take.
    log : str
        The compiler's output.
    from_cache : bool
        Whether the compiled code was found, on disk or in memory.
    """

    def __init__(
        self,
        device: Device,
        loaded: LoadedProgram,
        policy: Policy,
        for_clients: Callable[[], Program] | None = None,
    ) -> None:
        self.device = device
        self.policy = policy
        self.log = loaded.log
        self.from_cache = loaded.from_cache
        self._kernels: dict[str, Kernel] = {}
        for kernel in loaded.kernels:
            made = Kernel(device, kernel, policy, for_clients)
            if made.name in self._kernels:
                raise CompileError(f"two kernels are named {made.name}: rename one")
            self._kernels[made.name] = made
        if not self._kernels:
            raise CompileError(
                "the source defines no kernel: FW_KERNEL name(fw::array<float> x, ...) { ... }",
                self.log,
            )

    @property
    def kernels(self) -> tuple[str, ...]:
        """Their names, with their namespaces."""
        return tuple(self._kernels)

    def kernel(self, name: str) -> Kernel:
        """Return a kernel by its name, with its namespaces; raises ArgumentError."""
        try:
            return self._kernels[name]
        except KeyError:
            known = ", ".join(self._kernels)
            raise ArgumentError(f"there is no kernel {name!r}; the program has: {known}") from None

    __getitem__ = kernel

    def __repr__(self) -> str:
        return f"<Program of {', '.join(self._kernels)} on {self.device.name!r}>"


class Kernel(endings.NotCopied):
    """A kernel of a `Program`; call it to launch it.

    Attributes
    ----------
    name : str
        With its namespaces.
    signature : str
        As C++ spells it.
    """

    def __init__(
        self,
        device: Device,
        loaded: LoadedKernel,
        policy: Policy,
        for_clients: Callable[[], Program] | None = None,
    ) -> None:
        self._for_clients = for_clients
        self._device = device
        self._policy = policy
        self._loaded = loaded
        self.signature = spelling.demangle(loaded.symbol)
        self.name, self._params = parse_signature(self.signature, loaded)
        # The short way of launches whose arguments the ordinary way has accepted before.
        self._short = None
        if isinstance(device, devices.CudaDevice):
            kinds = [(param.kind, param.nbytes) for param in self._params]
            calls_of = operator.attrgetter("_attachment.row_calls")
            self._short = _native.KernelCalls(device, device.launching, calls_of, kinds)

    @property
    def resources(self) -> KernelResources | None:
        """Registers, stack and spills as the assembler reports them; None on the CPU device."""
        return self._loaded.resources

    def __call__(
        self,
        *arguments: object,
        warps: int | None = None,
        block_threads: int = 256,
        stream: object = None,
    ) -> None:
        """Launch the kernel.

        Parameters
        ----------
        *arguments
            One for each parameter: a `flashwarp.Array` for `fw::array<T>`; a `flashwarp.File` for
            `fw::file`; for a pointer an array in the device's memory of any library (numpy on the
            CPU device), `DeviceMemory`, or None; a Python or numpy number for a number; and for any
            other type its bytes, as `bytes`, a ctypes structure or a numpy record.
        warps : int, optional
            How many warps have something to do. The launch has at most as many as the device runs
            at a time, so kernels loop. Default: as many as run at a time. Then other kernels find
            no room on the GPU while the warps wait for storage; fewer warps leave room, and have
            fewer lines in flight, up to 32 each. On the CPU device a warp is one thread.
        block_threads : int
            Threads of a block on a GPU, a multiple of 32 and at most 256.
        stream : optional
            Where a GPU queues it. Default: the library's own stream. If there are arrays of torch
            or cupy among the arguments, the launch runs after the present work on the current
            streams of these libraries, and before their next work.

        Notes
        -----
        Returns at once on a GPU, when done on the CPU device. Keep the arguments until it is done.
        `Array.wait`, or the array's next call, raises failures to read or write the array.

        Raises
        ------
        ArgumentError, DtypeError, ReadOnlyError
            For arguments that do not fit the parameters; nothing is launched.
        ClosedError
            When an array or the device was closed.
        """
        if len(arguments) != len(self._params):
            raise ArgumentError(
                f"{self.signature} takes {len(self._params)} arguments, not {len(arguments)}"
            )
        short = self._short
        if short is not None and short.launch(arguments, warps, block_threads, stream):
            return
        accesses = accesses_of(self._params, arguments)
        if self._for_clients is not None and any(not array.cache.owned for array, _ in accesses):
            # A client's kernels must not mark what they hit. Compiled when it is first needed.
            same = self._for_clients()[self.name]
            same(*arguments, warps=warps, block_threads=block_threads, stream=stream)
            return
        prepared = self._prepare(warps, block_threads)
        launch = functools.partial(self._launch, prepared, arguments, accesses, stream)
        packed = in_turns(accesses, launch)
        if short is not None:
            short.learn(arguments, packed, warps, block_threads, prepared)

    def _prepare(self, warps: int | None, block_threads: int) -> devices.PreparedLaunch:
        if warps is not None:
            warps = integer("warps", warps, 0, _WARPS_MAX)
        block_threads = integer("block_threads", block_threads, 32, 256)
        if block_threads % 32:
            raise ArgumentError(f"block_threads={block_threads} is not a multiple of 32")
        return self._device.prepare(self._loaded, warps, block_threads)

    def _launch(
        self,
        prepared: devices.PreparedLaunch,
        arguments: Sequence[object],
        accesses: Sequence[tuple[Array, bool]],
        stream: object,
    ) -> tuple[bytes, ...]:
        """Launch in the turns of the arrays' caches; return the bytes of the parameters."""
        self._check_policies({array.cache for array, _ in accesses})
        launch = Launch(self._device, stream)
        pairs = zip(self._params, arguments, strict=True)
        packed = tuple(param.pack(argument, launch) for param, argument in pairs)
        uses: list[object] = []
        try:
            for array, _ in accesses:
                uses += array._turns.join_launch(stream)
            launchers = [(array._attachment.launcher, stores) for array, stores in accesses]
            run = functools.partial(launch.run, prepared, packed, uses)
            in_order(launchers, launch.handle, run)
        finally:
            # A kept exception keeps this frame. That must not keep the arrays' files open.
            uses.clear()
        return packed

    def _check_policies(self, caches: Iterable[Cache]) -> None:
        # The policy is compiled into the code, and another one may use words that the cache lacks.
        for cache in caches:
            wanted = cache.policy
            if not cache.owned:
                continue  # only the owner's fills ask the policy
            if wanted is not self._policy and wanted != self._policy:
                raise ArgumentError(
                    f"{self.name} was compiled for caches with policy {_named(self._policy)}, and "
                    f"an array's cache has {_named(wanted)}: compile it with "
                    f"policy={'x.cache.policy' if wanted.shared_by_gpus else repr(wanted.name)}"
                )

    def __repr__(self) -> str:
        return f"<Kernel {self.signature} on {self._device.name!r}>"
