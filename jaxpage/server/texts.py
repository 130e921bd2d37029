"""Texts that are too long are refused before they are tokenised, which would take long."""

from __future__ import annotations

from jaxpage.input_processor import InputProcessor


def check_length(prompt: object, inputs: InputProcessor) -> None:
    """Raise ValueError for a text that cannot fit, whatever its tokens are."""
    if not isinstance(prompt, str) or inputs.tokenizer is None:
        return
    most = inputs.limits.max_model_len * inputs.max_token_len
    if len(prompt) > most:
        raise ValueError(
            f"the prompt has {len(prompt)} characters, which are more than {inputs.limits.max_model_len} tokens "
            f"of at most {inputs.max_token_len} characters; shorten it"
        )
