"""The order of layers in an instance's objects, and whether two instances of one namespace agree on it. Pure.

Objects hold a layer group's layers in sequence without their names, so two instances with another order, or other
groups, would read each other's layers. Engines of different kinds name their layers differently, but the numbers in the
names count layers in the model's order everywhere. So the order of an instance is its names relative to their natural
order, in which numbers in a text compare as numbers.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping

import msgspec

from kvframework.api.keys import LAYER_ORDER_BYTES
from kvframework.api.layout import KVLayout
from kvframework.wire.registration import natural

# (layer group, place in it)
Place = tuple[int, int]


def layer_order(layout: KVLayout) -> bytes:
    """Return b"" for layers that follow each other in the natural order of their names, group after group, and for
    layers without names; else `LAYER_ORDER_BYTES` bytes that are equal for equal orders only, whatever the names.

    BLAKE2b over the JSON of each group's layers as positions in the natural order of all names.
    """
    position = _positions(layout)
    order = [[position[name] for name in group.layer_names] for group in layout.groups]
    flat = [each for group in order for each in group]
    if flat == sorted(flat):
        return b""
    encoded = msgspec.json.encode(order)
    return hashlib.blake2b(encoded, digest_size=LAYER_ORDER_BYTES, person=b"kvf-layers").digest()


def first_difference(mine: KVLayout, theirs: KVLayout) -> str:
    """Describe the first layer of one instance that lies elsewhere in the other; "" if there is none."""
    if [group.layer_names for group in mine.groups] == [group.layer_names for group in theirs.groups]:
        return ""
    here, there = _places(mine), _places(theirs)
    for name, places in here.items():
        if there.get(name, places) != places:
            return f"layer {_shown(name)} is {_told(places)} here, and {_told(there[name])} there"
    if layer_order(mine) == layer_order(theirs):
        return ""
    # The names differ in kind: describe the first place at which their natural orders differ.
    mine_at, theirs_at = _by_place(mine), _by_place(theirs)
    for place in sorted({*mine_at, *theirs_at}):
        name, position = mine_at.get(place, ("", -1))
        other, other_position = theirs_at.get(place, ("", -1))
        if position != other_position:
            return f"{_told((place,))} is {_shown(name)} here, and {_shown(other)} there: another order of names"
    return ""


def _positions(layout: KVLayout) -> Mapping[str, int]:
    names = {name for group in layout.groups for name in group.layer_names}
    return {name: position for position, name in enumerate(sorted(names, key=natural))}


def _places(layout: KVLayout) -> Mapping[str, tuple[Place, ...]]:
    """Return places by name, in the order of the layout. A layer whose keys and values lie in two groups has two."""
    places: defaultdict[str, tuple[Place, ...]] = defaultdict(tuple)
    for group, declared in enumerate(layout.groups):
        for index, name in enumerate(declared.layer_names):
            places[name] += ((group, index),)
    return places


def _by_place(layout: KVLayout) -> Mapping[Place, tuple[str, int]]:
    position = _positions(layout)
    return {
        (group, index): (name, position[name])
        for group, declared in enumerate(layout.groups)
        for index, name in enumerate(declared.layer_names)
    }


def _shown(name: str) -> str:
    return repr(name[:80]) if name else "without a name"


def _told(places: tuple[Place, ...]) -> str:
    return " and ".join(f"place {index} of layer group {group}" for group, index in places)
