"""The initial weights of training: heads that already attend to useful places.

From random weights, attention heads that copy ("induction") do not emerge within the millions of tokens that two CPU
cores can process in an hour. After Trockman and Kolter (2023), "Mimetic initialization of self-attention layers":

- Layer 0 records whom the text is about: two heads attend to the latest first and last name (a flag in the embedding,
  and RoPE pairs whose sum falls with distance), a third to the previous token. The results go to free channels.
- Layer 1 matches records: two heads attend to jobs, countries and digits under the same name, two others also require
  the same previous token. They copy what they find.
- Deeper heads are mimetic: query and key are alike, value and output are transposes.

Nothing here knows a table or its columns: which cell answers which question is learned.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from jaxpage.demo import words
from jaxpage.models.config import ModelConfig

# Channels of the residual stream at the start: content, then these, in this order.
NAME, PREVIOUS, FLAGS = 48, 28, 4  # the record of the name, of the previous token, the flags
FIRST, LAST, VALUE = -3, -2, -1  # flag channels: first name, last name, job, country or digit
SCALE = 0.1  # standard deviation of a channel of the embedding
POSITION_PAIRS = 12  # RoPE pairs fast enough to distinguish positions; the others compare content

Params = dict[str, np.ndarray]


def weights(config: ModelConfig, tokenizer: Tokenizer, *, seed: int) -> Params:
    """float32 values by parameter path. Raises ValueError unless there are four heads that share two KV heads."""
    if (config.num_heads, config.num_kv_heads) != (4, 2):
        raise ValueError(
            f"{config.num_heads} heads, {config.num_kv_heads} KV heads: the start is made for 4 and 2"
        )
    start = _Start(config, seed)
    params = {"model.embed_tokens.weight": start.embedding(tokenizer)}
    params["model.norm.weight"] = np.full(config.hidden_size, 0.5)
    previous = np.zeros(0)
    for index in range(config.num_layers):
        attention = start.attention()
        if index == 0:
            previous = start.record(attention)
        elif index == 1:
            start.match(attention, previous)
        else:
            start.resemble(attention)
        layer = {f"self_attn.{name}": value for name, value in attention.items()} | start.mlp()
        params |= {f"model.layers.{index}.{name}": value for name, value in layer.items()}
    return {path: value.astype(np.float32) for path, value in params.items()}


class _Start:
    def __init__(self, config: ModelConfig, seed: int) -> None:
        self.config, self.rng = config, np.random.default_rng(seed)
        self.size, self.half = config.head_dim, config.head_dim // 2
        self.content = config.hidden_size - NAME - PREVIOUS - FLAGS  # channels
        self.name = slice(self.content, self.content + NAME)
        self.previous = slice(self.name.stop, self.name.stop + PREVIOUS)
        slow = np.arange(POSITION_PAIRS + 1, self.half)
        # Dimensions of a head that RoPE hardly rotates within a conversation.
        self.dims = np.concatenate([slow, slow + self.half])

    def normal(self, *shape: int, std: float) -> np.ndarray:
        return self.rng.standard_normal(shape) * std

    def orthogonal(self, rows: int, columns: int) -> np.ndarray:
        """`rows` x `columns` with orthonormal rows, or orthonormal columns if there are fewer."""
        if rows > columns:
            return self.orthogonal(columns, rows).T
        return np.linalg.qr(self.rng.standard_normal((columns, rows)))[0].T

    def head(self, index: int) -> slice:
        return slice(index * self.size, (index + 1) * self.size)

    def embedding(self, tokenizer: Tokenizer) -> np.ndarray:
        """Random content, zeros for the records, flags; both spellings of a word start equal."""
        vocab_size = self.config.vocab_size
        table = np.zeros((vocab_size, self.config.hidden_size))
        table[:, : self.content] = self.normal(vocab_size, self.content, std=SCALE)
        values = words.OCCUPATIONS + words.COUNTRIES
        flags = ((FIRST, words.FIRST_NAMES), (LAST, words.LAST_NAMES), (VALUE, values))
        for flag, word in ((flag, word) for flag, flagged in flags for word in flagged):
            spaced = tokenizer.encode(f" {word}", add_special_tokens=False).ids[0]
            table[spaced, flag] = 3 * SCALE
            plain = tokenizer.encode(word, add_special_tokens=False).ids
            if len(plain) == 1:
                table[plain[0]] = table[spaced]
                table[plain[0], : self.content] += self.normal(self.content, std=SCALE / 3)
        for digit in "0123456789":
            table[tokenizer.token_to_id(digit), VALUE] = 3 * SCALE
        return table

    def attention(self) -> Params:
        embed, std = self.config.hidden_size, 0.1 * self.config.hidden_size**-0.5
        heads, kv_heads = self.config.num_heads * self.size, self.config.num_kv_heads * self.size
        widths = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
        p = {f"{name}.weight": self.normal(n, embed, std=std) for name, n in widths.items()}
        p["o_proj.weight"] = np.zeros((embed, heads))
        return p | {f"{name}.bias": np.zeros(width) for name, width in widths.items()}

    def mlp(self) -> Params:
        embed, inner = self.config.hidden_size, self.config.intermediate_size
        return {
            "input_layernorm.weight": np.ones(embed),
            "post_attention_layernorm.weight": np.ones(embed),
            "mlp.gate_proj.weight": self.normal(inner, embed, std=embed**-0.5),
            "mlp.up_proj.weight": self.normal(inner, embed, std=embed**-0.5),
            "mlp.down_proj.weight": np.zeros((embed, inner)),
        }

    def read_content(self, p: Params, group: int) -> np.ndarray:
        """Values of a KV head read a token's content. Returns the projection: [head_dim, content]."""
        read = self.orthogonal(self.size, self.content)
        p["v_proj.weight"][self.head(group)] = 0
        p["v_proj.weight"][self.head(group), : self.content] = read
        return read

    def record(self, p: Params) -> np.ndarray:
        """Layer 0: latest first name, latest last name, previous token; the fourth head is free.

        Returns the matrix from a token's content to the record of it in the next token.
        """
        size, half = self.size, self.half
        frequencies = np.array(self.config.ropes[0].inv_freq)
        p["k_proj.weight"][:size] = 0
        p["q_proj.weight"][: 2 * size] = 0
        for head, flag in ((0, FIRST), (1, LAST)):
            slow = POSITION_PAIRS + 4 * head
            for pair in (*range(2 + head, POSITION_PAIRS, 2), *range(slow, slow + 4)):
                p["k_proj.weight"][pair, flag] = 2.0
                p["q_proj.bias"][head * size + pair] = 10.0
        # The sum over pairs of c^2 cos(f (distance - 1)) is largest one token back.
        p["k_proj.bias"][size : size + half] = 8.0
        p["q_proj.bias"][2 * size : 2 * size + half] = 8.0 * np.cos(frequencies)
        p["q_proj.bias"][2 * size + half : 3 * size] = -8.0 * np.sin(frequencies)
        for group in range(2):
            self.read_content(p, group)
        middle = self.name.start + NAME // 2
        targets = slice(self.name.start, middle), slice(middle, self.name.stop), self.previous
        for head, target in enumerate(targets):
            write = self.orthogonal(target.stop - target.start, size)
            p["o_proj.weight"][target, self.head(head)] = SCALE * write
        return write @ p["v_proj.weight"][size:, : self.content]

    def match(self, p: Params, recorded: np.ndarray) -> None:
        """Layer 1: heads 0 and 1 find values under the same name, 2 and 3 those after the same token."""
        q, k, dims = p["q_proj.weight"], p["k_proj.weight"], self.dims
        self.copy(p, write=0.8)
        record = self.orthogonal(len(dims) - 2, NAME)
        for head in (0, 1):
            q[self.head(head)][dims[:-2], self.name] = 1.4 * record
            p["q_proj.bias"][head * self.size + dims[-2:]] = 4.0
        k[dims[:-2], self.name] = 1.4 * record
        k[dims[-2:], VALUE] = 1.5
        split = len(dims) // 2
        before = 1.8 * self.orthogonal(split, PREVIOUS)
        who = 1.4 * self.orthogonal(len(dims) - split, NAME)
        k[self.head(1)][dims[:split], self.previous] = before
        k[self.head(1)][dims[split:], self.name] = who
        for head in (2, 3):
            q[self.head(head)][dims[:split], : self.content] = before @ recorded
            q[self.head(head)][dims[split:], self.name] = who

    def resemble(self, p: Params) -> None:
        """Deeper layers: each head attends to tokens similar to the current one, mainly names, and copies."""
        shape = len(self.dims), self.config.hidden_size
        self.copy(p, write=0.1)
        for group in range(self.config.num_kv_heads):
            same = self.orthogonal(*shape)
            same[:, self.name] *= 2
            p["k_proj.weight"][self.head(group)][self.dims] = same
            for head in (2 * group, 2 * group + 1):
                q = p["q_proj.weight"][self.head(head)]
                q[self.dims] = same + 0.3 * self.orthogonal(*shape)

    def copy(self, p: Params, *, write: float) -> None:
        """Values read a token's content; outputs write it to the same channels."""
        for group in range(self.config.num_kv_heads):
            read = self.read_content(p, group)
            for head in (2 * group, 2 * group + 1):
                p["o_proj.weight"][: self.content, self.head(head)] = write * read.T
