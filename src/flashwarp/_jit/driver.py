"""The CUDA driver behind typed Python calls: memory and code of a GPU.

`Context` owns one GPU's primary context, whose streams `cuda_context` has.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from flashwarp._jit.cuda_api import call_driver, driver, driver_version, import_package
from flashwarp._jit.cuda_context import ContextOfStreams, Kernel
from flashwarp.errors import DeviceError, DeviceOutOfMemory


class Across(NamedTuple):
    """Memory of several GPUs at one range of addresses; `free` ends the mapping."""

    address: int
    part: int
    """Bytes on each GPU, one behind the other."""
    free: Callable[[], None]


class Context(ContextOfStreams):
    """One GPU's primary context, with its memory."""

    def memory_info(self) -> tuple[int, int]:
        """Free and total bytes of the GPU's memory."""
        free, total = self.call("cuMemGetInfo")
        return int(free), int(total)

    # Memory. Frees and unregistrations wait for every running kernel: call them when idle.

    def allocate(self, nbytes: int) -> int:
        """Uninitialized device memory; returns its address."""
        with self:
            doing = f"allocating {nbytes} bytes on cuda:{self.ordinal}"
            try:
                return int(call_driver("cuMemAlloc", nbytes, doing=doing))
            except DeviceOutOfMemory as error:
                free, total = call_driver("cuMemGetInfo")
                raise DeviceOutOfMemory(f"{error} ({free} of {total} bytes are free)") from None

    def allocate_host(self, nbytes: int) -> int:
        """Uninitialized pinned host memory with one address for the host and all GPUs."""
        cuda = driver()
        flags = cuda.CU_MEMHOSTALLOC_PORTABLE | cuda.CU_MEMHOSTALLOC_DEVICEMAP
        with self:
            doing = f"pinning {nbytes} bytes of host memory"
            address = int(call_driver("cuMemHostAlloc", nbytes, flags, doing=doing))
            self._require_same_address(address, "cuMemFreeHost")
        return address

    def allocate_exported(self, nbytes: int) -> tuple[int, int, int]:
        """Uninitialized device memory that other processes can map.

        Returns its address, its bytes, which are rounded up, and a descriptor of the caller's.
        """
        cuda, doing = driver(), f"allocating {nbytes} bytes on cuda:{self.ordinal} to share"
        with self, contextlib.ExitStack() as undo:
            wanted, size = self._shareable(cuda, nbytes, doing)
            handle = call_driver("cuMemCreate", size, wanted, 0, doing=doing)
            # The mapping and the descriptor keep the memory.
            undo.callback(call_driver, "cuMemRelease", handle)
            with contextlib.ExitStack() as failed:
                address = self._map(cuda, handle, size, failed, writable=True)
                kind = wanted.requestedHandleTypes
                descriptor = int(call_driver("cuMemExportToShareableHandle", handle, kind, 0))
                failed.pop_all()
        return address, size, descriptor

    def map_exported(
        self, descriptor: int, nbytes: int, *, writable: bool = False
    ) -> tuple[int, int]:
        """Map memory of `allocate_exported`; returns its address and its bytes."""
        cuda, doing = driver(), f"mapping {nbytes} bytes of another process on cuda:{self.ordinal}"
        with self, contextlib.ExitStack() as undo:
            wanted, size = self._shareable(cuda, nbytes, doing)
            kind = wanted.requestedHandleTypes
            handle = call_driver("cuMemImportFromShareableHandle", descriptor, kind, doing=doing)
            undo.callback(call_driver, "cuMemRelease", handle)
            with contextlib.ExitStack() as failed:
                address = self._map(cuda, handle, size, failed, writable=writable)
                failed.pop_all()
        return address, size

    def _shareable(
        self, cuda: Any, nbytes: int, doing: str, gpu: int | None = None
    ) -> tuple[Any, int]:
        """Return the properties of memory to share, and its bytes, rounded up."""
        wanted = cuda.CUmemAllocationProp()
        wanted.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        wanted.location = self._location(cuda, gpu)
        handles = cuda.CUmemAllocationHandleType
        wanted.requestedHandleTypes = handles.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        smallest = cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        unit = int(call_driver("cuMemGetAllocationGranularity", wanted, smallest, doing=doing))
        return wanted, -(-nbytes // unit) * unit

    def allocate_across(
        self, gpus: Sequence[int], users: Sequence[Context], nbytes: int
    ) -> tuple[Across, list[int]]:
        """Uninitialized memory of several GPUs at one range of addresses.

        Each of `gpus` has an equal part, one behind the other. Kernels on the GPUs of `users` may
        use all of it. Returns it and a descriptor of each part, by which other processes map it;
        the caller closes them.
        """
        cuda, doing = driver(), f"allocating {nbytes} bytes over {len(gpus)} GPUs"
        with self, contextlib.ExitStack() as undo, contextlib.ExitStack() as failed:
            wanted, part = self._parts(cuda, gpus, nbytes, doing)
            handles: list[Any] = []
            descriptors: list[int] = []
            for memory in wanted:
                handle = call_driver("cuMemCreate", part, memory, 0, doing=doing)
                undo.callback(call_driver, "cuMemRelease", handle)  # the mapping keeps it
                handles.append(handle)
                kind = memory.requestedHandleTypes
                descriptors.append(
                    int(call_driver("cuMemExportToShareableHandle", handle, kind, 0))
                )
                failed.callback(os.close, descriptors[-1])
            made = self._map_all(cuda, handles, part, users, doing)
            failed.pop_all()
        return made, descriptors

    def map_across(
        self, descriptors: Sequence[int], gpus: Sequence[int], users: Sequence[Context], nbytes: int
    ) -> Across:
        """Map memory of `allocate_across` of another process, by its descriptors."""
        cuda, doing = driver(), f"mapping {nbytes} bytes of another process over {len(gpus)} GPUs"
        with self, contextlib.ExitStack() as undo:
            wanted, part = self._parts(cuda, gpus, nbytes, doing)
            handles = []
            for memory, each in zip(wanted, descriptors, strict=True):
                kind = memory.requestedHandleTypes
                handle = call_driver("cuMemImportFromShareableHandle", each, kind, doing=doing)
                undo.callback(call_driver, "cuMemRelease", handle)
                handles.append(handle)
            return self._map_all(cuda, handles, part, users, doing)

    def _parts(
        self, cuda: Any, gpus: Sequence[int], nbytes: int, doing: str
    ) -> tuple[list[Any], int]:
        """Return the properties of each GPU's part, and its bytes, which all have alike."""
        each = -(-nbytes // len(gpus))
        wanted = [self._shareable(cuda, each, doing, gpu) for gpu in gpus]
        return [memory for memory, _ in wanted], max(size for _, size in wanted)

    def _map_all(
        self, cuda: Any, handles: Sequence[Any], part: int, users: Sequence[Context], doing: str
    ) -> Across:
        """Map parts one behind the other, for kernels on the GPUs of `users`."""
        whole = part * len(handles)
        with contextlib.ExitStack() as failed:
            address = int(call_driver("cuMemAddressReserve", whole, 0, 0, 0))
            failed.callback(call_driver, "cuMemAddressFree", address, whole)
            for i, handle in enumerate(handles):
                call_driver("cuMemMap", address + i * part, part, 0, handle, 0, doing=doing)
                failed.callback(call_driver, "cuMemUnmap", address + i * part, part)
            accesses = []
            for context in users:
                access = cuda.CUmemAccessDesc()
                access.location = context._location(cuda)
                access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                accesses.append(access)
            call_driver("cuMemSetAccess", address, whole, accesses, len(accesses), doing=doing)
            failed.pop_all()

        def free() -> None:
            if self.usable:
                for context in users:
                    context.outlast_served()
                for i in range(len(handles)):
                    self.call("cuMemUnmap", address + i * part, part)
                self.call("cuMemAddressFree", address, whole)

        return Across(address, part, free)

    def unmap_exported(self, address: int, nbytes: int) -> None:
        """End a mapping of `allocate_exported` or `map_exported`."""
        if self.usable:
            self.outlast_served()
            self.call("cuMemUnmap", address, nbytes)
            self.call("cuMemAddressFree", address, nbytes)

    def _map(
        self, cuda: Any, handle: Any, size: int, failed: contextlib.ExitStack, *, writable: bool
    ) -> int:
        address = int(call_driver("cuMemAddressReserve", size, 0, 0, 0))
        failed.callback(call_driver, "cuMemAddressFree", address, size)
        call_driver("cuMemMap", address, size, 0, handle, 0)
        failed.callback(call_driver, "cuMemUnmap", address, size)
        rights, access = cuda.CUmemAccess_flags, cuda.CUmemAccessDesc()
        access.location = self._location(cuda)
        access.flags = (
            rights.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            if writable
            else rights.CU_MEM_ACCESS_FLAGS_PROT_READ
        )
        doing = f"making {size} bytes {'writable' if writable else 'readable'} to this process"
        call_driver("cuMemSetAccess", address, size, [access], 1, doing=doing)
        return address

    def _location(self, cuda: Any, gpu: int | None = None) -> Any:
        location = cuda.CUmemLocation()
        location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self.ordinal if gpu is None else gpu
        return location

    def allocate_managed(self, nbytes: int) -> int:
        """Managed memory; never ask for more than the GPU has free."""
        flags = int(driver().CUmemAttach_flags.CU_MEM_ATTACH_GLOBAL)
        return int(self.call("cuMemAllocManaged", nbytes, flags))

    def place_managed(self, address: int, nbytes: int, stream: int, *, on_host: bool) -> None:
        """Advise the driver to keep managed memory somewhere, and queue a prefetch to there."""
        cuda = driver()
        kinds, location = cuda.CUmemLocationType, cuda.CUmemLocation()
        location.type = (
            kinds.CU_MEM_LOCATION_TYPE_HOST if on_host else kinds.CU_MEM_LOCATION_TYPE_DEVICE
        )
        location.id = 0 if on_host else self.ordinal
        prefers = cuda.CUmem_advise.CU_MEM_ADVISE_SET_PREFERRED_LOCATION
        self.call("cuMemAdvise", address, nbytes, prefers, location)
        self.call("cuMemPrefetchAsync", address, nbytes, location, 0, stream)

    def register_host(self, address: int, nbytes: int, read_only: bool) -> None:
        """Pins host memory that exists already, so that kernels reach it at the same address."""
        cuda = driver()
        flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        if read_only:
            if not self.registers_read_only:
                raise DeviceError(
                    f"cuda:{self.ordinal} cannot register read-only host memory, so it cannot read "
                    "a mapped file in place"
                )
            flags |= cuda.CU_MEMHOSTREGISTER_READ_ONLY
        kind = "read-only" if read_only else "writable"
        doing = f"registering {nbytes} {kind} bytes of host memory at {address:#x}"
        with self:
            try:
                call_driver("cuMemHostRegister", address, nbytes, flags, doing=doing)
            except DeviceError as error:
                if self._attribute("HOST_REGISTER_SUPPORTED"):
                    raise
                raise type(error)(
                    f"{error}; cuda:{self.ordinal} registers no host memory at all, as under "
                    "confidential computing"
                ) from None
            self._require_same_address(address, "cuMemHostUnregister")

    def register_io(self, address: int, nbytes: int) -> int:
        """Make a mapping of another device's registers reachable by kernels; returns their address.

        Kernels use `store_mmio` there.
        """
        cuda = driver()
        flags = cuda.CU_MEMHOSTREGISTER_DEVICEMAP | cuda.CU_MEMHOSTREGISTER_IOMEMORY
        doing = f"registering {nbytes} bytes of I/O memory at {address:#x}"
        with self:
            call_driver("cuMemHostRegister", address, nbytes, flags, doing=doing)
            try:
                return int(call_driver("cuMemHostGetDevicePointer", address, 0))
            except DeviceError:
                call_driver("cuMemHostUnregister", address)
                raise

    def export_dma_buf(self, address: int, nbytes: int) -> int:
        """Return a descriptor of the GPU's pages at an address, for other devices' drivers.

        Both are multiples of the host's page. The caller closes the descriptor.
        """
        kind = driver().CUmemRangeHandleType.CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD
        doing = f"exporting {nbytes} bytes at {address:#x} of cuda:{self.ordinal} as a dma-buf"
        with self:
            return int(
                call_driver("cuMemGetHandleForAddressRange", address, nbytes, kind, 0, doing=doing)
            )

    def _require_same_address(self, address: int, undo: str) -> None:
        """Commands carry one address that both the controller and the kernels use."""
        try:
            on_device = int(call_driver("cuMemHostGetDevicePointer", address, 0))
            if on_device != address:
                raise DeviceError(
                    f"pinned host memory at {address:#x} appears on cuda:{self.ordinal} at "
                    f"{on_device:#x}: the library needs one address for both"
                )
        except DeviceError:
            call_driver(undo, address)
            raise


class Module:
    """All kernels of one cubin, loaded completely.

    With CUDA's lazy loading the first launch of a kernel can wait for all running kernels. When a
    running kernel waits for us in turn, the process hangs; so nothing is left to load later.
    """

    def __init__(self, context: Context, cubin: bytes, names: Sequence[str]) -> None:
        self._context = context
        self._resident: dict[tuple[str, int], int] = {}
        context.outlast_served()
        with context:
            self._handle = call_driver(
                "cuModuleLoadData", cubin, doing="loading the compiled kernels"
            )
            try:
                self.kernels = {name: self._load(name) for name in names}
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Unloads the kernels; none of them may be running."""
        self._context.outlast_served()
        self._context.call("cuModuleUnload", self._handle)

    def _load(self, name: str) -> Kernel:
        handle = call_driver(
            "cuModuleGetFunction", self._handle, name.encode(), doing=f"kernel {name}"
        )
        # Added in CUDA 12.4. Before it, asking for an attribute loads the kernel too.
        if hasattr(driver(), "cuFuncLoad") and driver_version() >= (12, 4):
            call_driver("cuFuncLoad", handle, doing=f"kernel {name}")
        return Kernel(
            name=name,
            handle=int(handle),
            registers=_function_attribute(handle, "NUM_REGS"),
            threads_max=_function_attribute(handle, "MAX_THREADS_PER_BLOCK"),
        )

    def resident_blocks(self, kernel: Kernel, block_threads: int) -> int:
        """Count the blocks of a kernel that one multiprocessor runs at a time."""
        key = (kernel.name, block_threads)
        if key not in self._resident:
            count = "cuOccupancyMaxActiveBlocksPerMultiprocessor"
            self._resident[key] = int(self._context.call(count, kernel.handle, block_threads, 0))
        return self._resident[key]


def _function_attribute(handle: Any, name: str) -> int:
    attribute = getattr(driver().CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{name}")
    return int(call_driver("cuFuncGetAttribute", attribute, handle))


def dlpack_view(array: Any, stream: int | None) -> Any:
    """View a DLPack array on a GPU: ptr, shape, strides (in elements), dtype, readonly.

    With a stream the producer makes its work visible there; without one nothing is waited for.
    """
    utils = import_package("cuda.core.utils")
    return utils.StridedMemoryView.from_dlpack(array, -1 if stream is None else stream)
