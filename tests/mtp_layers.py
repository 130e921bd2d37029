"""MTP layers in torch, made of transformers' own decoder layers as vLLM's `deepseek_mtp.py` puts them together: tiny
ones, random or tame, beside the model's tensors, and the drafts that they make. Knows nothing of this package.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.eagle_heads import Given, Target

# Whose products are added to hidden states; experts are stacked in modules.
ADDED = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "down_proj")


class AnyLayer(nn.Module):
    """What MTP layers of all families do."""

    layer_ids: tuple[int, ...] = ()  # the model's last hidden states are read, after the norm

    def __init__(self, target: Target):
        super().__init__()
        torch.manual_seed(zlib.crc32(b"mtp"))
        self.target = (target,)  # the model is no part of this module

    def of_pairs(self, embeds: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        """Hidden states [T, E] after the norm, of the pairs of embeddings and hidden states, both [T, E].

        positions: [3, at least T] rotary ones; None: those of text.
        """
        raise NotImplementedError

    def after(self, block: nn.Module, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """[T, E]: what a decoder layer makes of x [T, E], the first tokens of a sequence."""
        (target,), length = self.target, len(x)
        positions = torch.arange(length)[None] if positions is None else positions[:, None, :length]
        future = torch.full((length, length), float("-inf")).triu(1)
        return block(
            x[None],
            attention_mask=future[None, None],
            position_ids=positions,
            position_embeddings=target.model.get_decoder().rotary_emb(x[None], positions),
        )[0]

    def logits(self, hidden: Tensor) -> Tensor:
        (target,) = self.target
        return target.model.get_output_embeddings()(hidden)

    @torch.no_grad()
    def drafts(
        self, tokens: list[int], hidden: Tensor, number: int, given: Given | None = None
    ) -> list[int]:
        """The guesses behind n tokens. hidden: [n - 1, E] of the model, for all but the last of them."""
        (target,), given, found = self.target, given or Given(), []
        embeds = target.embedding[torch.tensor(tokens)] if given.embeds is None else given.embeds
        after = embeds[1:]
        for _ in range(number):
            own = self.of_pairs(after, hidden, given.positions)
            found.append(given.best(self.logits(own[-1])))
            after = torch.cat([after, target.embedding[found[-1:]]])
            hidden = torch.cat([hidden, own[-1:]])
        return found


def one_by_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Those of a layer with a tensor for each projection of each expert, in place of modules' stacked ones."""
    found = {}
    for name, x in tensors.items():
        if name == "mlp.experts.gate_up_proj":
            for expert, each in enumerate(x):
                for part, rows in zip(("gate", "up"), each.chunk(2), strict=True):
                    found[f"mlp.experts.{expert}.{part}_proj.weight"] = rows
        elif name == "mlp.experts.down_proj":
            for expert, each in enumerate(x):
                found[f"mlp.experts.{expert}.down_proj.weight"] = each
        else:
            found[name] = x
    return found


def add_to(folder: Path, tensors: dict[str, Tensor], option: str) -> Path:
    """Write tensors of an MTP layer into the checkpoint of its model. option: of config.json, or of its part about
    text, which becomes 1.
    """
    file, config = folder / "model.safetensors", folder / "config.json"
    added = {name: x.detach().clone() for name, x in tensors.items()}
    save_file(load_file(file) | added, file, metadata={"format": "pt"})
    values = json.loads(config.read_text())
    values.get("text_config", values)[option] = 1
    config.write_text(json.dumps(values))
    return folder


class Layer(AnyLayer):
    """Its parameters have the names of checkpoints, without the number of the layer; those of experts are stacked."""

    def __init__(self, target: Target):
        super().__init__(target)
        model, decoder = target.model, target.model.get_decoder()
        config, size = model.config, model.config.hidden_size
        self.number = config.num_hidden_layers
        # GLM-4.7-Flash has one for each layer.
        if hasattr(config, "mlp_layer_types"):
            config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        last = decoder.layers[-1]
        self.block = type(last)(config, self.number)
        self.enorm, self.hnorm, self.norm = (type(last.input_layernorm)(size) for _ in range(3))
        for norm in (self.enorm, self.hnorm, self.norm):
            norm.variance_epsilon = config.rms_norm_eps
        self.eh_proj = nn.Linear(2 * size, size, bias=False)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.fill_(1).add_(torch.randn_like(parameter) * 0.3)
                elif name.endswith("bias"):
                    parameter.normal_(0, 0.5)
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
            self.block.mlp.gate.e_score_correction_bias.normal_(0, 0.3)

    def of_pairs(self, embeds: Tensor, hidden: Tensor, positions: Tensor | None = None) -> Tensor:
        # vLLM masks that of position 0.
        embeds = torch.cat([torch.zeros_like(embeds[:1]), embeds[1:]])
        x = self.eh_proj(torch.cat([self.enorm(embeds), self.hnorm(hidden)], -1))
        return self.norm(self.after(self.block, x, positions))

    def tensors(self, *, copies: bool = True) -> dict[str, Tensor]:
        """By name in checkpoints, with copies of the model's embedding and LM head, as most have them, or without."""
        (target,) = self.target
        found = {
            f"{name}.weight": getattr(self, name).weight for name in ("enorm", "hnorm", "eh_proj")
        }
        found["shared_head.norm.weight"] = self.norm.weight
        if copies:
            found["embed_tokens.weight"] = target.embedding
            found["shared_head.head.weight"] = target.model.get_output_embeddings().weight
        found |= one_by_one(self.block.state_dict())
        return {f"model.layers.{self.number}.{name}": x for name, x in found.items()}

    def add_to(self, folder: Path, *, copies: bool = True) -> Path:
        """Write the layer into the checkpoint of its model."""
        return add_to(folder, self.tensors(copies=copies), "num_nextn_predict_layers")

    @torch.no_grad()
    def tame(self) -> Layer:
        """Such that it guesses well for a model that `tame` has changed."""
        (target,) = self.target
        size = self.eh_proj.out_features
        self.eh_proj.weight.mul_(0.02)[:, :size].add_(torch.eye(size))
        self.enorm.weight.fill_(1)
        self.norm.weight.copy_(target.model.get_decoder().norm.weight)
        for name, parameter in self.block.named_parameters():
            if name.endswith(ADDED):
                parameter.mul_(0.02)
        return self


def tame(folder: Path) -> Path:
    """Change the model of a checkpoint so that tokens follow from the one before more than from all others."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name, x in tensors.items():
        if name.endswith(ADDED):
            x.mul_(0.01)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
