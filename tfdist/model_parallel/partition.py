"""Where stages begin whose first layers the user has named."""

from collections.abc import Sequence


def named_starts(names: Sequence[str], cuts: Sequence[str]) -> list[int]:
    """Returns where stages begin whose first layers the user has named.

    Args:
        names: By position, the name of the layer; of a layer inside of a nested model the names of both, "model/layer".
        cuts: The names of the first layers of stages 1 and following. A nested model stands for its first layer, and
            a layer's own name is sufficient if it is unique.

    Raises:
        ValueError: A name is unknown or not unique, or the order differs from that of the layers.

    >>> named_starts(["a", "b", "c"], ["c"])
    [0, 2]
    >>> named_starts(["a", "net/b", "net/c", "d"], ["net", "c"])
    [0, 1, 2]
    """
    found = [_named(names, cut) for cut in cuts]
    unknown = [cut for cut, of_cut in zip(cuts, found, strict=True) if not of_cut]
    if unknown:
        raise ValueError(
            f"A cut names a layer that the model does not have. Received: {unknown}. Expected: names among "
            f"{list(dict.fromkeys(names))}. Layers inside of another layer cannot begin a stage."
        )
    for cut, of_cut in zip(cuts, found, strict=True):
        if len(of_cut) > 1:
            raise ValueError(
                f"A cut names several layers of nested models. Received: {cut!r}. Expected: one of {of_cut}."
            )
    starts = [0, *(names.index(of_cut[0]) for of_cut in found)]
    if any(after <= before for before, after in zip(starts, starts[1:], strict=False)):
        raise ValueError(
            f"The cuts are not in the order of the layers, or leave a stage empty. Received: cuts={list(cuts)}, at the "
            f"positions {starts[1:]}. Expected: increasing positions from 1, in the order {list(dict.fromkeys(names))}."
        )
    return starts


def _named(names: Sequence[str], cut: str) -> list[str]:
    """The first layers of what a cut may mean: a layer or nested model with this full name, or else with this name."""
    full = [name for name in names if f"{name}/".startswith(f"{cut}/")]
    if full:
        return full[:1]
    found: dict[str, str] = {}  # by the full name of a layer or nested model
    for name in names:
        before, is_in, _ = f"/{name}/".partition(f"/{cut}/")
        if is_in:
            found.setdefault(f"{before}/{cut}", name)
    return list(found.values())
