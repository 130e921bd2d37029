"""EAGLE heads in torch, written after the papers and vLLM's `llama_eagle3.py` and `llama_eagle.py`: tiny checkpoints of
them, random or trained, and the drafts that they make. Knows nothing of this package.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "vocab_size": 250,
    "draft_vocab_size": 90,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, kw_only=True)
class Given:
    """What is not as in a text, of n tokens and drafts behind them."""

    positions: Tensor | None = None  # [3, ...]: rotary ones
    embeds: Tensor | None = None  # [n, E]: what the first layer of the model reads
    never: tuple[int, ...] = ()  # tokens that are not drafted

    def best(self, logits: Tensor) -> int:
        """The token with the largest of the logits [V]."""
        logits = logits.clone()
        logits[list(self.never)] = float("-inf")
        return int(logits.argmax())


class Norm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


def linear(size: int, outputs: int) -> nn.Linear:
    return nn.Linear(size, outputs, bias=False)


class Attention(nn.Module):
    def __init__(self, config: dict[str, Any], width: int):
        super().__init__()
        self.heads, self.kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        size = config["hidden_size"]
        self.dim = config.get("head_dim") or size // self.heads
        self.theta = config["rope_theta"]
        counts = (config.get("rope_scaling") or {}).get("mrope_section") or [self.dim // 2, 0, 0]
        # Which of three positions turns each frequency, as in vLLM's MRotaryEmbedding.
        self.axes = torch.arange(3).repeat_interleave(torch.tensor(counts))
        self.q_proj = linear(width, self.heads * self.dim)
        self.k_proj = linear(width, self.kv_heads * self.dim)
        self.v_proj = linear(width, self.kv_heads * self.dim)
        self.o_proj = linear(self.heads * self.dim, size)
        eps, has_norms = config["rms_norm_eps"], config["model_type"] == "qwen3"
        self.q_norm = Norm(self.dim, eps) if has_norms else nn.Identity()
        self.k_norm = Norm(self.dim, eps) if has_norms else nn.Identity()

    def forward(self, x: Tensor, positions: Tensor | None) -> Tensor:
        """[T, W] -> [T, E], causal; positions are 0 .. T-1, or the first of those given, [3, ...]."""
        length = x.shape[0]
        if positions is None:
            positions = torch.arange(length).expand(3, -1)
        positions = positions[:, :length]
        q = self.q_norm(self.q_proj(x).view(length, self.heads, self.dim))
        k = self.k_norm(self.k_proj(x).view(length, self.kv_heads, self.dim))
        q, k = self.turned(q, positions), self.turned(k, positions)
        v = self.v_proj(x).view(length, self.kv_heads, self.dim)
        k, v = (each.repeat_interleave(self.heads // self.kv_heads, dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        return self.o_proj(torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1))

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        half = self.dim // 2
        frequencies = self.theta ** (-torch.arange(half) / half)
        angles = positions[self.axes].T * frequencies
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class MLP(nn.Module):
    def __init__(self, config: dict[str, Any]):
        super().__init__()
        size, inner = config["hidden_size"], config["intermediate_size"]
        self.gate_proj, self.up_proj = linear(size, inner), linear(size, inner)
        self.down_proj = linear(inner, size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, config: dict[str, Any], *, is_first: bool):
        super().__init__()
        size, eps = config["hidden_size"], config["rms_norm_eps"]
        self.normed_residual = config.get("norm_before_residual", False)
        self.input_layernorm = Norm(size, eps)
        self.hidden_norm = Norm(size, eps) if is_first else None
        self.self_attn = Attention(config, 2 * size if is_first else size)
        self.post_attention_layernorm = Norm(size, eps)
        self.mlp = MLP(config)

    def forward(self, features: Tensor, embeds: Tensor, positions: Tensor | None) -> Tensor:
        if self.hidden_norm is None:
            x = features + self.self_attn(self.input_layernorm(features), positions)
        else:
            normed = self.hidden_norm(features)
            both = torch.cat([self.input_layernorm(embeds), normed], -1)
            x = (normed if self.normed_residual else features) + self.self_attn(both, positions)
        return x + self.mlp(self.post_attention_layernorm(x))


class Head(nn.Module):
    """Its parameters have the names of checkpoints. `embedding`: [V, E], the model's, unless config has its own."""

    def __init__(self, config: dict[str, Any], embedding: Tensor, *, seed: str = "head"):
        super().__init__()
        torch.manual_seed(zlib.crc32(seed.encode()))
        self.config = config
        size, vocab_size = config["hidden_size"], config["vocab_size"]
        draft_vocab_size = config.get("draft_vocab_size") or vocab_size
        self.layer_ids = config["eagle_aux_hidden_state_layer_ids"]
        read_size = config.get("target_hidden_size") or size
        width = len(self.layer_ids) * read_size
        eps = config["rms_norm_eps"]
        self.input_norm = Norm(width, eps) if config.get("norm_before_fc") else None
        norms = [Norm(read_size, eps) for _ in self.layer_ids]
        self.fc_norm = nn.ModuleList(norms) if config.get("fc_norm") else None
        self.fc = linear(width, size) if self.layer_ids else nn.Identity()
        self.midlayer = Layer(config, is_first=True)
        others = range(1, config["num_hidden_layers"])
        self.layers = nn.ModuleDict({str(i): Layer(config, is_first=False) for i in others})
        self.norm = Norm(size, config["rms_norm_eps"])
        self.lm_head = linear(size, draft_vocab_size)
        self.own_embedding = embedding.shape[1] != size
        self.embedding = torch.randn(vocab_size, size) * 0.3 if self.own_embedding else embedding
        # Ascending, as in checkpoints.
        known = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
        self.d2t = known - torch.arange(draft_vocab_size)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)

    def features(self, hidden: Tensor) -> Tensor:
        """[T, E] of the model's hidden states [T, N * M]."""
        if self.input_norm is not None:
            hidden = self.input_norm(hidden)
        if self.fc_norm is not None:
            parts = hidden.chunk(len(self.fc_norm), dim=-1)
            hidden = torch.cat([n(x) for n, x in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(hidden)

    def forward(
        self, tokens: Tensor, features: Tensor, positions: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Logits [T, D] of the pairs of tokens [T] and features [T, E], and the head's own features [T, E]."""
        x = self.midlayer(features, self.embedding[tokens], positions)
        for layer in self.layers.values():
            x = layer(x, x, positions)
        hidden = self.norm(x)
        return self.lm_head(hidden), hidden if self.config.get("norm_output") else x

    @torch.no_grad()
    def drafts(
        self, tokens: list[int], hidden: Tensor, number: int, given: Given | None = None
    ) -> list[int]:
        """The guesses behind n tokens. hidden: [n - 1, N * M] of the model, for all but the last of them.

        Embeddings that are given are not read: vLLM's `Eagle3LlamaForCausalLM.embed_input_ids` ignores them.
        """
        given = given or Given()
        features, after, found = self.features(hidden), list(tokens[1:]), []
        for _ in range(number):
            logits, own = self(torch.tensor(after), features, given.positions)
            whole = torch.full((self.config["vocab_size"],), float("-inf"))
            whole[self.d2t + torch.arange(len(self.d2t))] = logits[-1]
            found.append(given.best(whole))
            after.append(found[-1])
            features = torch.cat([features, own[-1:]])
        return found

    def save(self, folder: Path, **changes: Any) -> Path:
        """changes: of config.json, which other formats have; a value None deletes."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.detach().contiguous() for name, x in self.named_parameters()}
        known = torch.zeros(self.config["vocab_size"], dtype=torch.bool)
        known[self.d2t + torch.arange(len(self.d2t))] = True
        tensors |= {"d2t": self.d2t, "t2d": known}
        if self.own_embedding:
            tensors["embed_tokens.weight"] = self.embedding
        save_file(tensors, folder / "model.safetensors")
        values = {k: v for k, v in (self.config | changes).items() if v is not None}
        (folder / "config.json").write_text(json.dumps(values))
        return folder


FIRST: dict[str, Any] = {
    name: value
    for name, value in CONFIG.items()
    if name not in ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
} | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 2}


class FirstHead(nn.Module):
    """A head of the first EAGLE, whose second layer is like any other; for a target of transformers."""

    layer_ids: tuple[int, ...] = ()

    def __init__(self, target: Target, *, bias: bool, **changes: Any):
        """changes: of config.json."""
        super().__init__()
        torch.manual_seed(1)
        self.config, self.target = FIRST | changes, (target,)  # no part of this module
        size = self.config["hidden_size"]
        self.fc = nn.Linear(2 * size, size, bias=bias)
        number = self.config["num_hidden_layers"]
        layers = [Layer(self.config, is_first=False) for _ in range(number)]
        layers[0].input_layernorm = nn.Identity()
        self.layers = nn.ModuleList(layers)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                if "norm" in name:
                    parameter.add_(torch.randn_like(parameter) * 0.3)
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)

    @torch.no_grad()
    def drafts(
        self, tokens: list[int], hidden: Tensor, number: int, given: Given | None = None
    ) -> list[int]:
        """As those of `Head`; hidden: [n - 1, M], of the last layer after the norm."""
        (target,), given = self.target, given or Given()
        features, after, found = hidden, list(tokens[1:]), []
        for _ in range(number):
            x = self.fc(torch.cat([target.embedding[torch.tensor(after)], features], -1))
            for layer in self.layers:
                x = layer(x, x, given.positions)
            found.append(given.best(target.model.get_output_embeddings()(x[-1])))
            after.append(found[-1])
            features = torch.cat([features, x[-1:]])
        return found

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {name: x.detach().contiguous() for name, x in self.named_parameters()}
        (target,) = self.target
        tensors["embed_tokens.weight"] = target.embedding.clone()  # a copy, as some have
        save_file(tensors, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config))
        return folder


class Target:
    """A model of transformers, whose hidden states a head reads."""

    def __init__(self, folder: Path):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @property
    def embedding(self) -> Tensor:
        return self.model.get_input_embeddings().weight.detach()

    def given(self, tokens: list[int], number: int) -> Given:
        """What is not as in a text, of a sequence and so many drafts behind it."""
        return Given()

    @torch.no_grad()
    def hidden(self, tokens: list[int], layer_ids: list[int]) -> Tensor:
        """[T, N * M]: the inputs of these layers, behind the last one its output; () is what the head of the model
        reads.
        """
        seen: dict[int, Tensor] = {}
        decoder = self.model.get_decoder()

        def keep(number: int) -> Any:
            def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
                seen[number] = inputs[0][0]

            return hook

        modules = [*decoder.layers, decoder.norm]
        hooks = [m.register_forward_pre_hook(keep(i)) for i, m in enumerate(modules)]
        last = self.last(tokens)
        for hook in hooks:
            hook.remove()
        return torch.cat([seen[i] for i in layer_ids], -1) if layer_ids else last

    def last(self, tokens: list[int]) -> Tensor:
        """[T, M]: what the head of the model reads."""
        return self.model.get_decoder()(torch.tensor([tokens])).last_hidden_state[0]


def train(head: Head, target: Target, sequences: list[list[int]], *, steps: int) -> Head:
    """So that the head often guesses the tokens of these sequences, of the model and then of itself."""
    hidden = [target.hidden(tokens, head.layer_ids) for tokens in sequences]
    own_number = {int(t): i for i, t in enumerate(head.d2t + torch.arange(len(head.d2t)))}
    labels = [torch.tensor([own_number.get(t, -100) for t in tokens]) for tokens in sequences]
    optimiser = torch.optim.Adam(head.parameters(), 3e-3)
    for _ in range(steps):
        loss = torch.zeros(())
        for tokens, read, label in zip(sequences, hidden, labels, strict=True):
            logits, own = head(torch.tensor(tokens[1:-1]), head.features(read[:-2]))
            loss = loss + functional.cross_entropy(logits, label[2:])
            # Behind a guess the head's own feature is in the place of the model's.
            logits, _ = head(torch.tensor(tokens[2:-1]), own[:-1])
            loss = loss + functional.cross_entropy(logits, label[3:])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return head
