"""Where instances of one namespace hold their layers: equal orders are equal whatever the names, others never are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvframework.api.layout import KVLayout, LayerGroup
from kvframework.service.registration import layer_order, same_layers


def group_of(names: list[str]) -> LayerGroup:
    return LayerGroup(max(len(names), 1), 16, 1, 8, "int8", layer_names=tuple(names))


def layout(*groups: list[str]) -> KVLayout:
    return KVLayout("paged", tuple(group_of(names) for names in groups))


def numbers(*groups: list[int], form: str = "model.layers.{}.attn") -> KVLayout:
    return layout(*([form.format(number) for number in group] for group in groups))


orders = st.permutations(range(12)).flatmap(
    lambda order: st.lists(st.integers(0, 12), max_size=2).map(
        lambda cuts: [order[begin:end] for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), 12], strict=True)]
    )
)
FORMS = ("model.layers.{}.attn", "{}", "h{}_k", "layer_{:02}")


@given(orders, orders, st.sampled_from(FORMS), st.sampled_from(FORMS))
def test_equal_orders_are_equal_whatever_the_names(
    mine: list[list[int]], theirs: list[list[int]], form: str, other: str
) -> None:
    one, two = numbers(*mine, form=form), numbers(*theirs, form=other)
    same = mine == theirs
    if [len(group) for group in mine] == [len(group) for group in theirs]:
        assert (layer_order(one) == layer_order(two)) == same
        assert same_layers(one, two) == same
    assert same_layers(one, one)


@given(
    st.lists(st.lists(st.text(max_size=6), max_size=5), max_size=4), st.lists(st.lists(st.text(max_size=6)), max_size=4)
)
def test_any_names_have_an_order(mine: list[list[str]], theirs: list[list[str]]) -> None:
    one, two = layout(*mine), layout(*theirs)
    assert len(layer_order(one)) in (0, 16)
    assert same_layers(one, two) == same_layers(two, one)


@pytest.mark.parametrize("groups", [[[*range(12)]], [[0, 1], [2, 3]], [[], [0, 1]], [[]]])
def test_the_order_of_the_names_is_told_by_nothing(groups: list[list[int]]) -> None:
    assert layer_order(numbers(*groups)) == b""


def test_a_number_of_any_length_is_one() -> None:
    long = "9" * 100_000
    assert layer_order(layout(["0" + long, long + "0"])) == b""
    assert layer_order(layout([long + "0", long])) != b""


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        (numbers([0, 1], [2, 3]), numbers([0, 1], [2, 3]), True),
        (numbers([0, 1, 2]), numbers([0, 2, 1]), False),
        (numbers([0, 1], [2, 3]), numbers([0, 2], [1, 3]), False),
        (numbers([0, 1]), numbers([1, 2]), False),
        (numbers([0, 1], [2, 3]), numbers([0, 2], [1, 3], form="{}"), False),
        # Layers without names are taken for ordered ones.
        (layout([]), numbers([0, 1, 2]), True),
        (layout([]), numbers([0, 2, 1]), False),
        # Keys and values in groups of their own: one name stands in two groups.
        (numbers([0, 1], [0, 1]), numbers([0, 1], [0, 1]), True),
        (numbers([0, 1], [0, 1]), numbers([0, 1], [1, 0]), False),
        # One tensor for all layers has one name.
        (layout(["kv", "kv"]), numbers([0, 1]), True),
    ],
)
def test_the_same_layers_in_the_same_places(mine: KVLayout, theirs: KVLayout, same: bool) -> None:
    assert same_layers(mine, theirs) == same
