"""The guest's kernel and initramfs, made from Debian's packages and kept under `build/qemu`.

Nothing is installed: the kernel's package is downloaded by apt and unpacked. Its modules stay in
that folder, where the guest finds them, since the guest's root is that of the host. What is missing
on a machine raises `Unavailable`, with the command that installs it.
"""

from __future__ import annotations

import fcntl
import lzma
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = ROOT / "build" / "qemu"
INIT = Path(__file__).with_name("init.sh")

# The package of each program that is needed beside those of every Debian.
PACKAGE_OF = {
    "qemu-system-x86_64": "qemu-system-x86",
    "busybox": "busybox-static",
    "cpio": "cpio",
    "depmod": "kmod",
}

# The package that depends on the newest kernel; or one kernel's own, or the path of a package.
KERNEL = os.environ.get("FLASHWARP_QEMU_KERNEL", "linux-image-amd64")

# What the guest needs to mount the host's root. It loads the others from there.
FIRST_MODULES = ("virtio_pci", "9pnet_virtio", "9p")

# The superuser's programs are not on everybody's path.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

_DOWNLOAD_LIMIT_S = 180

# How long the newest kernel is not asked for again.
_RESOLVED_S = 24 * 3600


class Unavailable(Exception):
    """No guest can be made here; the message says why, and what to do."""


@dataclass(frozen=True)
class GuestImage:
    """What QEMU boots, and the folder for `modprobe -d`."""

    release: str
    kernel: Path
    initramfs: Path
    modules: Path


def guest_image() -> GuestImage:
    """Return the image, made at the first call on a machine. Raises Unavailable."""
    _require_programs()
    package, file = _resolve_kernel()
    with _exclusive_cache():
        folder = CACHE / (file.stem if file else package)
        if not (folder / "boot").is_dir():
            _unpack(file or _download(package), folder)
        (kernel,) = folder.glob("boot/vmlinuz-*")
        release = kernel.name.removeprefix("vmlinuz-")
        initramfs = folder / "initramfs"
        if not initramfs.exists() or initramfs.stat().st_mtime < INIT.stat().st_mtime:
            _make_initramfs(folder, release, initramfs)
    return GuestImage(release, kernel, initramfs, folder)


def _require_programs() -> None:
    missing = [name for each, name in PACKAGE_OF.items() if not shutil.which(each, path=_PATH)]
    busybox = shutil.which("busybox", path=_PATH)
    # One that is linked to libraries does not run before the host's root is mounted.
    if busybox and b"ld-linux" in Path(busybox).read_bytes()[:4096]:
        missing.append(PACKAGE_OF["busybox"])
    if missing:
        raise Unavailable(
            f"packages are missing; on Debian: sudo apt-get install {' '.join(missing)}"
        )
    if not all(shutil.which(each) for each in ("apt-get", "apt-cache", "dpkg")):
        raise Unavailable("the guest's kernel comes from Debian's packages, and there is no apt")


def _resolve_kernel() -> tuple[str, Path | None]:
    """Return the name of the kernel's package, or the file that holds it."""
    if KERNEL.endswith(".deb"):
        return "", Path(KERNEL)
    if re.match(r"linux-image-\d", KERNEL):
        return KERNEL, None
    known = CACHE / KERNEL
    if known.is_file() and time.time() - known.stat().st_mtime < _RESOLVED_S:
        return known.read_text(), None
    listed = _call("apt-cache", "depends", KERNEL, fails="apt does not know the package")
    found = re.findall(r"Depends: (linux-image-\d\S*)", listed)
    if not found:
        raise Unavailable(f"apt does not know the package {KERNEL}: sudo apt-get update")
    CACHE.mkdir(parents=True, exist_ok=True)
    known.write_text(found[0])
    return found[0], None


def _download(package: str) -> Path:
    folder = CACHE / "download"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _call("apt-get", "download", package, cwd=folder, fails="the kernel was not downloaded")
    (file,) = folder.glob("*.deb")
    return file


def _unpack(file: Path, folder: Path) -> None:
    unfinished = folder.with_name(folder.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    _call("dpkg", "-x", str(file), str(unfinished))
    (modules,) = unfinished.glob("*lib/modules/*") or unfinished.glob("usr/lib/modules/*")
    if not (unfinished / "lib").exists():
        (unfinished / "lib").symlink_to("usr/lib")
    _call("depmod", "-b", str(unfinished), modules.name)
    unfinished.rename(folder)
    shutil.rmtree(CACHE / "download", ignore_errors=True)


def _make_initramfs(folder: Path, release: str, initramfs: Path) -> None:
    """Pack busybox, the first modules in the order in which they load, and `init.sh`."""
    tree = folder / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("bin", "modules", "proc", "sys", "dev", "host"):
        (tree / name).mkdir(parents=True)
    shutil.copy(shutil.which("busybox", path=_PATH) or "busybox", tree / "bin" / "busybox")
    shutil.copy(INIT, tree / "init")
    (tree / "init").chmod(0o755)
    order: list[str] = []
    for module in FIRST_MODULES:
        shown = _call("modprobe", "-d", str(folder), "-S", release, "--show-depends", module)
        for path in re.findall(r"^insmod (\S+)", shown, re.MULTILINE):
            _copy_module(Path(path), tree / "modules", order)
    (tree / "modules" / "order").write_text("\n".join(order) + "\n")
    names = "\n".join(str(path.relative_to(tree)) for path in [tree, *sorted(tree.rglob("*"))])
    with initramfs.open("wb") as packed:
        command = ["cpio", "--quiet", "--create", "--format=newc", "--owner=0:0"]
        subprocess.run(command, cwd=tree, input=names.encode(), stdout=packed, check=True)


def _copy_module(path: Path, to: Path, order: list[str]) -> None:
    name = path.name.removesuffix(".xz")
    if name in order:
        return
    order.append(name)
    read = lzma.open if path.suffix == ".xz" else open
    with read(path, "rb") as module:
        (to / name).write_bytes(module.read())


def _call(*command: str, cwd: Path | None = None, fails: str = "") -> str:
    """Return what a program prints. Raises Unavailable with what it says when it fails."""
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env={**os.environ, "PATH": _PATH, "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=_DOWNLOAD_LIMIT_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Unavailable(f"{fails or command[0]}: {error}") from error
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        raise Unavailable(f"{fails or command[0]}: {' '.join(command)}: {said}")
    return done.stdout


@contextmanager
def _exclusive_cache() -> Iterator[None]:
    """Let one process at a time make the image."""
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    try:
        print(f"guest: Linux {guest_image().release}")
    except Unavailable as error:
        sys.exit(f"no guest can be made here: {error}")
