"""Names of earlier versions are refused, and the refusal has the new name."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from typing import Any

import pytest

import flashwarp as fw
from flashwarp import _names
from flashwarp.errors import FlashwarpError, RenamedError

# By the names of `OLD`: where the module, class or function is.
PLACES = {
    "Array": "flashwarp.array.array",
    "Cache": "flashwarp.cache.cache",
    "CopyEngine": "flashwarp.transfer.engine",
    "Checkpointer": "flashwarp.checkpoint.checkpointer",
    "Device": "flashwarp.device.base",
    "Event": "flashwarp.device.streams",
    "Explanation": "flashwarp.explanation",
    "File": "flashwarp.file.file",
    "Future": "flashwarp.array.futures",
    "Gatherer": "flashwarp.transfer.gatherer",
    "Gvdk": "flashwarp.file.gvdk.image",
    "Offloaded": "flashwarp.interop.torch.offload",
    "Pipeline": "flashwarp.pipeline.pipeline",
    "Service": "flashwarp.nvme.controller",
    "Settings": "flashwarp.checkpoint.settings",
    "SoftwareController": "flashwarp.nvme.software",
    "Stager": "flashwarp.interop.torch.dcp.stager",
    "Ticket": "flashwarp.pipeline.ticket",
    "VfioController": "flashwarp.nvme.vfio",
    "load": "flashwarp.loading.load",
    "offload": "flashwarp.interop.torch.offload",
    "offload_activations": "flashwarp.interop.torch.activations",
    "read_config": "flashwarp.checkpoint.veloc",
}
ROWS = [(owner, old, new) for owner, names in _names.OLD.items() for old, new in names.items()]


def thing(owner: str) -> Any:
    if owner.startswith("flashwarp"):
        return importlib.import_module(owner)
    first, _, member = owner.partition(".")
    module = PLACES[first]
    if ".torch" in module:
        pytest.importorskip("torch", reason="torch is an extra")
    found = getattr(importlib.import_module(module), first)
    return getattr(found, member) if member else found


def use(owner: str, old: str) -> None:
    """Use an old name, in a way that needs no object."""
    found = thing(owner)
    if owner == "read_config":
        found({"scratch": "x", old.rstrip("="): "1"})
    elif old.endswith("="):
        found(**{old.rstrip("="): None})
    elif inspect.isclass(found):
        found.__getattr__(None, old)  # as Python does for what an object lacks
    else:
        getattr(found, old)


@pytest.mark.parametrize(("owner", "old", "new"), ROWS, ids=lambda text: text)
def test_an_old_name_is_refused_with_the_new_one(owner: str, old: str, new: str) -> None:
    with pytest.raises(RenamedError, match=rf"{re.escape(old)} is now {re.escape(new)}"):
        use(owner, old)


@pytest.mark.parametrize(("owner", "old", "new"), ROWS, ids=lambda text: text)
def test_the_new_name_exists(owner: str, old: str, new: str) -> None:
    found = thing(owner)
    if new.startswith("flashwarp."):
        module, _, name = new.rpartition(".")
        assert hasattr(importlib.import_module(module), name)
    elif new.endswith("=") and owner != "read_config":
        call = inspect.signature(found).parameters
        assert new.rstrip("=") in call or any(
            each.kind is each.VAR_KEYWORD for each in call.values()
        )
    elif owner != "read_config" and new.isidentifier():
        fields = getattr(found, "__annotations__", {})
        made_by_init = rf"self\.{new}\b"
        assert (
            hasattr(found, new)
            or new in fields
            or re.search(made_by_init, inspect.getsource(found))
        )


def test_nothing_has_an_old_name_and_the_new_one() -> None:
    for owner, old, _ in ROWS:
        if not old.endswith("="):
            found = PLACES.get(owner.partition(".")[0])
            if found is None or ".torch" not in found:
                assert old not in dir(thing(owner)), f"{owner}.{old}"


def test_a_renamed_name_is_like_a_missing_one() -> None:
    assert not hasattr(fw, "SSDModel")
    assert issubclass(RenamedError, FlashwarpError)
    assert issubclass(RenamedError, AttributeError)
    assert issubclass(RenamedError, TypeError)


def test_an_import_of_a_moved_name_says_where_it_is() -> None:
    with pytest.raises(ImportError, match=r"SSDModel is now flashwarp\.nvme\.SSDModel"):
        exec("from flashwarp import SSDModel", {})
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec("from flashwarp import nothing", {})


def test_a_name_that_never_existed_gets_pythons_error() -> None:
    with pytest.raises(AttributeError, match="module 'flashwarp' has no attribute 'nothing'"):
        _ = fw.nothing
    with fw.device.CpuDevice() as device, pytest.raises(AttributeError, match="'nothing'"):
        _ = device.nothing  # type: ignore[attr-defined]


def test_the_package_is_a_command() -> None:
    said = subprocess.run(
        [sys.executable, "-m", "flashwarp", "--version"],
        capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip

    assert said.stdout.split()[0] == "flashwarp"
