"""Graphs as the tests write them down and read them."""

from flashwarp.graphs.inputs import load


def rows_of(graph):
    """The lists, as lists."""
    lists = graph.in_memory()
    return [lists[a:b].tolist() for a, b in zip(graph.offsets, graph.offsets[1:], strict=False)]


def text_graph(tmp_path, text, name="edges.txt", **options):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return load(path, tmp_path / "graph", **options)
