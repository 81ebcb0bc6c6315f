"""What torch's users call: tables and their training, operators, loaders and saved states."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import shutil
import warnings
from typing import Any

import numpy as np

import flashwarp as fw
from flashwarp.errors import FlashwarpError
from oracle.arrays import choose
from oracle.model import Wrong
from oracle.steps import step
from oracle.world import Hand, Held

torch: Any = None
fwt: Any = None
fwp: Any = None
NodeLoader: Any = None


@functools.cache
def _import() -> bool:
    global torch, fwt
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        print("oracle: no torch, so no programs of tables, loaders and states", flush=True)
        return False
    fwt = importlib.import_module("flashwarp.torch")
    return True


def there_is_torch(hand: Hand) -> bool:
    """Whether tensors can lie in the memory of the device."""
    return hand.machine.kind != "fake" and _import()


def _device(hand: Hand) -> str:
    return "cuda" if hand.machine.on_gpu else "cpu"


def _table(hand: Hand) -> Held | None:
    held = choose(hand) if there_is_torch(hand) else None
    fits = held is not None and held.dtype == np.float32 and len(held.row_shape) == 1
    return held if fits else None


@step(4)
def look_up(hand: Hand) -> None:
    """Look rows of a table up."""
    held = _table(hand)
    if held is None:
        return
    rows = hand.ids(held, repeats=True)
    dim = hand.random.randint(1, held.row_shape[0])
    hand.say("fwt.Embedding({}, dim={})({})", held, dim, rows)
    read = held.model.read(rows)
    table = fwt.Embedding(held.array, dim=dim)
    ids = torch.from_numpy(rows).to(_device(hand))
    whole = held.model.now[rows]
    whole[:, :dim] = table(ids).detach().cpu().numpy()
    hand.check(held, read, whole)


@step(4, alone=True)
def train(hand: Hand) -> None:
    """Make a step of training; its numbers are such that no sum is rounded."""
    held = _table(hand)
    if held is None:
        return
    rows = hand.ids(held, repeats=True)
    line = hand.say("fwt.SGD(table of {}, lr=1).step()  # of gradients of {}", held, rows)
    table = fwt.Embedding(held.array)
    optimizer = fwt.SGD(table, lr=1.0)
    gradients = hand.values(held, len(rows)) % 64
    ids = torch.from_numpy(rows).to(_device(hand))
    (table(ids) * torch.from_numpy(gradients.copy()).to(_device(hand))).sum().backward()
    optimizer.step()
    changed = np.unique(rows)
    total = np.zeros((held.count, *held.row_shape), np.float32)
    np.add.at(total, rows, gradients)
    hand.stores(held, line, changed, held.model.now[changed] - total[changed])


@step(3)
def operators(hand: Hand) -> None:
    """Read or store rows by torch's operators."""
    held = choose(hand) if there_is_torch(hand) else None
    if held is None or held.dtype.kind not in "fi" or held.dtype.itemsize not in (4, 8):
        return
    rows = hand.ids(held)
    ids = torch.from_numpy(rows).to(_device(hand))
    if hand.odds(0.5):
        hand.say("fwt.gather({}, {})", held, rows)
        read = held.model.read(rows)
        hand.check(held, read, fwt.gather(held.array, ids).cpu().numpy())
        return
    values = hand.values(held, len(rows))
    line = hand.say("fwt.scatter({}, {}, values)", held, rows)
    fwt.scatter(held.array, ids, torch.from_numpy(values.copy()).to(_device(hand)))
    hand.stores(held, line, rows, values)


@step(1, alone=True)
def loader(hand: Hand) -> None:
    """Loop over batches, after a look at some that is given up."""
    held = choose(hand) if there_is_torch(hand) else None
    if held is None or held.dtype.kind not in "fi" or held.pipelines:
        return
    batch = hand.random.randint(1, held.count)
    seen = hand.random.randint(0, 2)
    hand.say("loader = fwt.Loader({}, {}); {} batches; list(loader)", held, batch, seen)
    batches = fwt.Loader(held.array, batch)
    given_up = iter(batches)
    for _ in range(min(seen, -(-held.count // batch))):
        next(given_up)
    whole = [each.cpu().numpy() for each in batches]
    del given_up
    got = np.concatenate(whole).reshape(-1, *held.row_shape)
    hand.check(held, held.model.read(np.arange(held.count)), got)


# States.


def _tensor(hand: Hand, number: int) -> Any:
    rows, columns = hand.random.choice(((3, 2), (64, 32), (1, 1)))
    base = np.arange(rows * columns, dtype="f4").reshape(rows, columns) + 1000 * number
    kind = hand.random.choice(("numpy", "fortran", "strided", "torch", "transposed", "conjugated"))
    if kind == "fortran":
        return np.asfortranarray(base)
    if kind == "strided":
        return np.repeat(base, 2, axis=1)[:, ::2]
    if kind == "numpy":
        return base
    tensor = torch.from_numpy(base.copy()).to(_device(hand))
    if kind == "transposed":
        return tensor.t()
    return torch.complex(tensor, -tensor).t().conj() if kind == "conjugated" else tensor


@step(2, alone=True)
def save_state(hand: Hand) -> None:
    """Save a dict of arrays, some of which are one, and load it."""
    if not there_is_torch(hand):
        return
    state: dict[str, Any] = {}
    for number in range(hand.random.randint(1, 6)):
        again = state and hand.odds(0.2)
        state[f"w{number}"] = (
            hand.random.choice(list(state.values())) if again else _tensor(hand, number)
        )
    folder = hand.world.folders["memory"] / "states"
    hand.say("fwt.save({}, folder); fwt.load(folder)", {k: v.shape for k, v in state.items()})
    try:
        fwt.save(state, folder, version=0, replace=True)
        got = fwt.load(folder)
        hand.world.checks += 1
        for name, tensor in state.items():
            right = torch.as_tensor(tensor).resolve_conj().cpu()
            seen = torch.as_tensor(got[name]).resolve_conj().cpu()
            if seen.shape != right.shape or not torch.equal(seen, right):
                raise Wrong(f"{name} was loaded as {seen.flatten()[:4]}, not {right.flatten()[:4]}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@step(1, alone=True)
def activations(hand: Hand) -> None:
    """Compute gradients with and without offloading, where a tensor may change in place."""
    if not there_is_torch(hand):
        return
    changes = hand.random.choice((None, "input", "middle"))
    seed = hand.random.getrandbits(30)
    hand.say("backward() with fwt.offload_activations(), in-place change: {}", changes)

    def gradient(offload: bool) -> Any:
        generator = torch.Generator().manual_seed(seed)
        data = torch.rand(64, 64, generator=generator).to(_device(hand))
        weight = torch.rand(64, 64, generator=generator).to(_device(hand)).requires_grad_()
        try:
            if offload:
                with fwt.offload_activations(hand.world.folders["memory"], device=_device(hand)):
                    loss = _loss(data, weight, changes)
                    loss.backward()
            else:
                _loss(data, weight, changes).backward()
        except RuntimeError as error:
            return type(error)
        return weight.grad.cpu()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        right, got = gradient(False), gradient(True)
    hand.world.checks += 1
    if isinstance(right, type):
        if isinstance(got, torch.Tensor):
            raise Wrong("a tensor changed in place before backward, and no error was raised")
    elif not isinstance(got, torch.Tensor) or not torch.equal(got, right):
        raise Wrong(f"gradients differ: {got} and {right}")


def _loss(data: Any, weight: Any, changes: str | None) -> Any:
    middle = data @ weight
    result = (middle * middle).sum() + (data * weight).sum()
    if changes == "input":
        data += 1
    if changes == "middle":
        with torch.no_grad():
            middle += 1
    return result


@step(0.5, alone=True)
def save_an_offloaded_model(hand: Hand) -> None:
    """Ask a model for its state whose table was offloaded: it has the table, or refuses."""
    if not there_is_torch(hand):
        return
    hand.say("with fwt.offload(model, 'table', file): model.state_dict()")
    path = hand.world.folders["memory"] / "model.safetensors"
    table = np.arange(800, dtype="f4").reshape(100, 8)
    place = {"dtype": "F32", "shape": [100, 8], "data_offsets": [0, table.nbytes]}
    text = json.dumps({"table.weight": place}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + table.tobytes())
    model = torch.nn.ModuleDict({"table": torch.nn.Embedding(100, 8)}).eval().to(_device(hand))
    hand.world.checks += 1
    with fwt.offload(model, "table", path, host_memory="4 MiB", gpu_memory="64 MiB"):
        ids = torch.tensor([7, 99], device=_device(hand))
        if not np.array_equal(model["table"](ids).cpu().numpy(), table[[7, 99]]):
            raise Wrong("an offloaded table gives other rows")
        try:
            state = model.state_dict()
        except FlashwarpError:
            return
        if "table.weight" not in state:
            raise Wrong("the state of an offloaded model lacks its table without a word")


@step(0.3, alone=True)
def types_of_nodes(hand: Hand) -> None:
    """Give seeds of one type of nodes to a loader of PyG, beside features of two types."""
    if not there_is_torch(hand) or hand.machine.on_gpu or not _import_pyg():
        return
    hand.say("NodeLoader((features of papers and authors, graph), input_nodes=('paper', ids))")
    folder = hand.world.folders["memory"]
    count = 60
    stored = {
        "paper": np.arange(count, dtype="f4")[:, None],
        "author": 1000 + np.arange(count, dtype="f4")[:, None],
        "offsets": np.arange(count + 1),
        "neighbours": (np.arange(count) + 1) % count,
    }
    with contextlib.ExitStack() as opened:
        arrays = {}
        for name, content in stored.items():
            np.save(folder / f"{name}.npy", content)
            array = fw.open(folder / f"{name}.npy", device="cpu")
            arrays[name] = opened.enter_context(array)
        lists = arrays["offsets"], arrays["neighbours"]
        kinds = ("paper", "author")
        hand.world.checks += 1
        try:
            features = fwp.FeatureStore({(kind, "x"): arrays[kind] for kind in kinds})
            graph = fwp.GraphStore({("paper", "cites", "paper"): lists})
            sampler = fwp.NeighborSampler(lists, (2,))
            loader = NodeLoader(
                (features, graph), sampler, input_nodes=("paper", torch.arange(4)), batch_size=4
            )
            batch = next(iter(loader))
        except (FlashwarpError, ValueError, KeyError):
            return
        found = batch["paper"].x if hasattr(batch, "node_types") else batch.x
        if found[:4].flatten().tolist() != [0.0, 1.0, 2.0, 3.0]:
            raise Wrong(f"papers 0 to 3 have the features {found[:4].flatten().tolist()}")


@functools.cache
def _import_pyg() -> bool:
    global fwp, NodeLoader
    try:
        NodeLoader = importlib.import_module("torch_geometric.loader").NodeLoader
    except ImportError:
        print("oracle: no torch_geometric, so no programs of its loaders", flush=True)
        return False
    fwp = importlib.import_module("flashwarp.pyg")
    return True
