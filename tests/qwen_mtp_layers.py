"""MTP layers of Qwen3-Next and Qwen3.5 in torch, made of transformers' own decoder layers as vLLM's
`qwen3_next_mtp.py` and `qwen3_5_mtp.py` put them together. Knows nothing of this package.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.eagle_heads import Target
from tests.mtp_layers import ADDED, AnyLayer, add_to, one_by_one


class QwenLayer(AnyLayer):
    """Its parameters have the names of checkpoints; those of experts are stacked."""

    def __init__(self, target: Target):
        super().__init__(target)
        decoder = target.model.get_decoder()
        config = copy.deepcopy(decoder.config)
        config.layer_types = ["full_attention"]
        # In vLLM it is layer 0, which decides whether it has experts.
        self.block = type(decoder.layers[0])(config, 0)
        size, norm = config.hidden_size, type(decoder.norm)
        self.fc = nn.Linear(2 * size, size, bias=False)
        names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
        for name in names:
            setattr(self, name, norm(size, eps=config.rms_norm_eps))
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.normal_(0, 0.3)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.5)
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)

    def of_pairs(self, embeds: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        both = [self.pre_fc_norm_embedding(embeds), self.pre_fc_norm_hidden(hidden)]
        return self.norm(self.after(self.block, self.fc(torch.cat(both, -1)), positions))

    def tensors(self, *, joined: bool = False) -> dict[str, Tensor]:
        """By name in checkpoints. joined: all experts in one tensor, as in modules."""
        block = self.block.state_dict()
        found = {f"layers.0.{k}": x for k, x in (block if joined else one_by_one(block)).items()}
        found |= {k: x for k, x in self.state_dict().items() if not k.startswith("block.")}
        return {f"mtp.{name}": x for name, x in found.items()}

    def add_to(self, folder: Path, *, joined: bool = False) -> Path:
        """Write the layer into the checkpoint of its model."""
        return add_to(folder, self.tensors(joined=joined), "mtp_num_hidden_layers")

    @torch.no_grad()
    def tame(self) -> QwenLayer:
        """As `mtp_layers.Layer.tame`."""
        (target,), size = self.target, self.fc.out_features
        self.fc.weight.mul_(0.02)[:, :size].add_(torch.eye(size))
        self.pre_fc_norm_embedding.weight.zero_()
        self.norm.weight.copy_(target.model.get_decoder().norm.weight)
        for name, parameter in self.block.named_parameters():
            if name.endswith(ADDED):
                parameter.mul_(0.02)
        return self
