"""A picture of a model: its nodes, who predicts whom, shapes and energies."""

from typing import Any

from pcx._free_energy import Graph, graph
from pcx._types import ModelError


def _columns(picture: Graph) -> dict[str, int]:
    """How many edges the longest way from an input to each node has; parents always stand further left."""
    columns: dict[str, int] = {}
    for name, parents in picture.parents.items():
        columns[name] = 1 + max((columns[parent] for parent in parents), default=-1)
    return columns


def draw(model: Any, x: Any = None, *, energies: Any = None, axes: Any = None) -> Any:
    """Draw the graph of a model with matplotlib and return the axes; ``axes.figure.savefig(path)`` writes it.

    ``energies``, from `pcx.energies`, adds each node's mean energy over the batch.
    """
    try:
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise ModelError("drawing needs matplotlib; install it with: pip install 'pcx[plot]'.") from error
    picture = graph(model, x)
    if not picture.parents:
        raise ModelError(f"{type(model).__name__} calls no vode; there is nothing to draw.")
    columns = _columns(picture)
    rows: dict[int, list[str]] = {}
    for name, column in columns.items():
        rows.setdefault(column, []).append(name)
    place = {name: (2.6 * c, (len(names) - 1) / 2 - i) for c, names in rows.items() for i, name in enumerate(names)}
    bends = any(columns[name] - columns[p] > 1 for name, parents in picture.parents.items() for p in parents)
    if axes is None:
        width, height = 2.6 * len(rows) + 2.2, 1.6 * max(map(len, rows.values())) + 1.2
        _, axes = plt.subplots(figsize=(min(width, 30), height), layout="constrained")
    for name, parents in picture.parents.items():
        for parent in parents:
            far = columns[name] - columns[parent] > 1
            style = {"arrowstyle": "-|>", "color": "0.4", "shrinkA": 34, "shrinkB": 34}
            style["connectionstyle"] = "arc3,rad=-0.2" if far else "arc3"
            axes.annotate("", place[name], place[parent], arrowprops=style)
        if name in picture.readers:
            left, height = place[name]
            start, end = (left - 1.5, height), (left - 0.75, height)
            if parents:  # their arrows come from the left, so this one comes from above
                start, end = (left, height + 0.7), (left, height + 0.3)
            axes.annotate("x", end, start, ha="center", va="center", arrowprops={"arrowstyle": "-|>"})
    for name, (left, height) in place.items():
        shape = "×".join(map(str, picture.shapes[name])) or "1"
        lines = [name, shape, picture.energies[name]]
        if energies is not None:
            lines.append(f"E = {float(energies[name].mean()):.3g}")
        box = {"boxstyle": "round,pad=0.5", "facecolor": "#e8eef7", "edgecolor": "#35507a"}
        axes.text(left, height, "\n".join(lines), ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(-2, 2.6 * max(rows) + 1.5)
    axes.set_ylim(-max(map(len, rows.values())) / 2 - 0.6, max(map(len, rows.values())) / 2 + (1.2 if bends else 0.6))
    axes.set_axis_off()
    return axes
