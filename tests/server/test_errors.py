"""Which field of a request an error is about."""

from __future__ import annotations

import pytest

from jaxpage.prompts import too_long
from jaxpage.server.errors import to_api_error


@pytest.mark.parametrize(
    ("contains", "param"), [("9 input tokens", "input_tokens"), ("9 characters", "input_text")]
)
@pytest.mark.parametrize("where", ["", "prompt 1 of 2: "])
def test_a_prompt_that_is_too_long_is_recognised_by_its_message(where, contains, param):
    error = to_api_error(ValueError(f"{where}{too_long(8, contains)}; shorten it"))
    assert (error.status, error.param) == (400, param)
