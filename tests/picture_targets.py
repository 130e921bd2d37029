"""What heads read behind pictures, of transformers' own models."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jaxpage.pictures.border import Expanded, Picture
from tests import picture_models
from tests.eagle_heads import Given, Target


class PictureTarget(Target):
    """A Qwen2.5-VL, Qwen3-VL or Qwen3.5, for sequences that begin with one of these prompts. never: tokens that are not
    drafted.
    """

    def __init__(
        self,
        folder: Path,
        prompts: Sequence[tuple[Expanded, list[Picture]]],
        *,
        never: Sequence[int],
    ):
        self.model, self.prompts = picture_models.torch_model(folder), prompts
        self.never = tuple(never)

    @torch.no_grad()
    def given(self, tokens: list[int], number: int) -> Given:
        """As the model gives it to its layers."""
        seen: dict[str, Tensor] = {}

        def keep(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            seen["embeds"], seen["positions"] = inputs[0][0, : len(tokens)], inputs[1][:, 0]

        hook = self.model.get_decoder().rotary_emb.register_forward_pre_hook(keep)
        self.last([*tokens, *[0] * (number - 1)])
        hook.remove()
        assert seen["positions"].shape == (3, len(tokens) + number - 1)
        return Given(**seen, never=self.never)

    def last(self, tokens: list[int]) -> Tensor:
        prompt, pictures = next(
            (prompt, pictures)
            for prompt, pictures in self.prompts
            if tokens[: len(prompt.token_ids)] == prompt.token_ids
        )
        whole = dataclasses.replace(prompt, token_ids=tokens)
        inputs: dict[str, Any] = picture_models.qwen_inputs(whole, pictures)
        return self.model.model(**inputs).last_hidden_state[0]
