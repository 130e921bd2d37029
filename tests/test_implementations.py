"""How an operation finds its implementation: in order, with the reasons of those that cannot serve."""

from __future__ import annotations

import pytest

from jaxpage.ops import attention, blocks, embedding, experts, lora, matmul, state_kernel
from jaxpage.ops.implementations import Implementation, first_supported, require


def accept(x: int) -> int:
    require("it is odd" if x % 2 else None)
    return x // 2


LIST = (
    Implementation("half", "tpu", accept),
    Implementation("fewer", "tpu", lambda x: require("it is large" if x > 9 else None) or x - 1),
    Implementation("same", None, lambda x: x),
)


@pytest.mark.parametrize(
    ("x", "platform", "name", "chosen", "reason"),
    [
        (4, "tpu", "half", 2, None),
        (5, "tpu", "fewer", 4, "it is odd"),
        (11, "tpu", "same", 11, "it is odd; it is large"),
        (5, "cpu", "same", 5, None),
    ],
)
def test_the_first_that_can_serve_does_and_the_others_say_why_not(
    x, platform, name, chosen, reason
):
    choice = first_supported("numbers", LIST, x, platform)
    assert (choice.name, choice.chosen, choice.reason) == (name, chosen, reason)


def test_if_none_can_serve_one_error_has_all_reasons():
    with pytest.raises(NotImplementedError) as error:
        first_supported("numbers", (*LIST[:2], Implementation("gpus", "gpu", accept)), 11, "tpu")
    assert str(error.value).splitlines() == [
        "no implementation of numbers can serve this on the platform tpu:",
        "  half: it is odd",
        "  fewer: it is large",
        "  gpus: it is for the platform gpu",
    ]


@pytest.mark.parametrize(
    "implementations",
    [
        *(
            operation.IMPLEMENTATIONS
            for operation in (attention, blocks, embedding, experts, lora, state_kernel)
        ),
        *matmul.IMPLEMENTATIONS.values(),
    ],
)
def test_xla_is_the_last_of_each_operation_and_serves_everywhere(implementations):
    *others, last = implementations
    assert (last.name, last.platform) == ("xla", None)
    assert all(each.platform is not None for each in others)
