"""The weights that training starts from: heads that already attend to useful places.

From random weights, attention heads that copy ("induction") do not appear within the millions of
tokens that two CPU cores can read in an hour. Trockman and Kolter (2023), "Mimetic initialization of
self-attention layers", start from weights that look like trained ones; we go on in that direction.

- Layer 0 keeps a record of "who is being spoken of": two heads attend to the latest first name and
  the latest last name (a flag in the embedding, and RoPE pairs whose sum falls with distance), a
  third to the previous token. What they find goes to channels that the embedding leaves free.
- Layer 1 matches records: two heads attend to the jobs, countries and digits that stand under the
  same name, two more want the previous token to match as well. They copy what they find.
- Deeper heads are mimetic: query and key alike, value and output transposed.

Nothing here knows a table or its columns: which cell answers which question is learned.
"""

from __future__ import annotations

import numpy as np
from tokenizers import Tokenizer

from jaxpage.demo import words
from jaxpage.models.config import ModelConfig

# What the channels of the residual stream hold at the start, in this order.
NAME, PREVIOUS, FLAGS = 48, 28, 4  # the record of the name, of the previous token, the flags
FIRST, LAST, VALUE = -3, -2, -1  # flag channels: first name, last name, job, country or digit
SCALE = 0.1  # spread of a channel of the embedding
POSITION_PAIRS = 12  # RoPE pairs that turn fast enough to tell positions; the rest tell content


def weights(config: ModelConfig, tokenizer: Tokenizer, *, seed: int) -> dict[str, np.ndarray]:
    """float32 values by parameter path. Raises ValueError for other heads than four that share two KV
    heads.
    """
    if (config.num_heads, config.num_kv_heads) != (4, 2):
        raise ValueError(
            f"{config.num_heads} heads, {config.num_kv_heads} KV heads: the start is made for 4 and 2"
        )
    rng = np.random.default_rng(seed)
    embed, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    previous = np.zeros(0)
    params: dict[str, np.ndarray] = {
        "model.embed_tokens.weight": _embedding(config, tokenizer, rng),
        "model.norm.weight": np.full(embed, 0.5),
    }
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}."
        attention = {
            "q_proj.weight": _normal(rng, heads, embed, std=0.1 * embed**-0.5),
            "k_proj.weight": _normal(rng, kv_heads, embed, std=0.1 * embed**-0.5),
            "v_proj.weight": _normal(rng, kv_heads, embed, std=0.1 * embed**-0.5),
            "o_proj.weight": np.zeros((embed, heads)),
            "q_proj.bias": np.zeros(heads),
            "k_proj.bias": np.zeros(kv_heads),
            "v_proj.bias": np.zeros(kv_heads),
        }
        if index == 0:
            previous = _record(attention, config, rng)
        elif index == 1:
            _match(attention, config, rng, previous)
        else:
            _mimetic(attention, config, rng)
        params |= {f"{prefix}self_attn.{name}": value for name, value in attention.items()}
        params |= {
            f"{prefix}input_layernorm.weight": np.ones(embed),
            f"{prefix}post_attention_layernorm.weight": np.ones(embed),
            f"{prefix}mlp.gate_proj.weight": _normal(rng, inner, embed, std=embed**-0.5),
            f"{prefix}mlp.up_proj.weight": _normal(rng, inner, embed, std=embed**-0.5),
            f"{prefix}mlp.down_proj.weight": np.zeros((embed, inner)),
        }
    return {path: value.astype(np.float32) for path, value in params.items()}


def _normal(rng: np.random.Generator, *shape: int, std: float) -> np.ndarray:
    return rng.standard_normal(shape) * std


def _orthogonal(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """`rows` x `columns` with orthonormal rows, or columns if those are fewer."""
    if rows > columns:
        return _orthogonal(rng, columns, rows).T
    return np.linalg.qr(rng.standard_normal((columns, rows)))[0].T


def _content(config: ModelConfig) -> int:
    """How many channels the embedding of a token fills."""
    return config.hidden_size - NAME - PREVIOUS - FLAGS


def _embedding(config: ModelConfig, tokenizer: Tokenizer, rng: np.random.Generator) -> np.ndarray:
    """Random content, zeros for the records, flags; the two spellings of a word start alike."""
    table = np.zeros((config.vocab_size, config.hidden_size))
    content = _content(config)
    table[:, :content] = _normal(rng, config.vocab_size, content, std=SCALE)
    values = words.OCCUPATIONS + words.COUNTRIES
    for flag, flagged in ((FIRST, words.FIRST_NAMES), (LAST, words.LAST_NAMES), (VALUE, values)):
        for word in flagged:
            spaced = tokenizer.encode(f" {word}", add_special_tokens=False).ids[0]
            table[spaced, flag] = 3 * SCALE
            plain = tokenizer.encode(word, add_special_tokens=False).ids
            if len(plain) == 1:
                table[plain[0]] = table[spaced]
                table[plain[0], :content] += _normal(rng, content, std=SCALE / 3)
    for digit in "0123456789":
        table[tokenizer.token_to_id(digit), VALUE] = 3 * SCALE
    return table


def _slices(config: ModelConfig) -> tuple[slice, slice]:
    """The channels of the name's record and of the previous token's."""
    content = _content(config)
    return slice(content, content + NAME), slice(content + NAME, content + NAME + PREVIOUS)


def _record(p: dict[str, np.ndarray], config: ModelConfig, rng: np.random.Generator) -> np.ndarray:
    """Layer 0: latest first name, latest last name, previous token; the fourth head is free.

    Returns the matrix that takes the content of a token to what the next one records of it.
    """
    size, half, content = config.head_dim, config.head_dim // 2, _content(config)
    frequencies = np.array(config.ropes[0].inv_freq)
    p["k_proj.weight"][:size] = 0
    p["q_proj.weight"][: 2 * size] = 0
    for head, flag in ((0, FIRST), (1, LAST)):
        for pair in range(2 + head, POSITION_PAIRS, 2):
            p["k_proj.weight"][pair, flag] = 2.0
            p["q_proj.bias"][head * size + pair] = 10.0
        for pair in range(POSITION_PAIRS + 4 * head, POSITION_PAIRS + 4 * head + 4):
            p["k_proj.weight"][pair, flag] = 2.0
            p["q_proj.bias"][head * size + pair] = 10.0
    # sum over pairs of c^2 cos(f (distance - 1)) is largest one token back
    p["k_proj.bias"][size : size + half] = 8.0
    p["q_proj.bias"][2 * size : 2 * size + half] = 8.0 * np.cos(frequencies)
    p["q_proj.bias"][2 * size + half : 3 * size] = -8.0 * np.sin(frequencies)
    name, previous = _slices(config)
    middle = name.start + NAME // 2
    for group in range(2):
        read = _orthogonal(rng, size, content)
        p["v_proj.weight"][group * size : (group + 1) * size] = 0
        p["v_proj.weight"][group * size : (group + 1) * size, :content] = read
    first, last = slice(name.start, middle), slice(middle, name.stop)
    for head, target in ((0, first), (1, last), (2, previous)):
        write = _orthogonal(rng, target.stop - target.start, size)
        p["o_proj.weight"][target, head * size : (head + 1) * size] = SCALE * write
    return write @ p["v_proj.weight"][size:, :content]


def _match(
    p: dict[str, np.ndarray], config: ModelConfig, rng: np.random.Generator, recorded: np.ndarray
) -> None:
    """Layer 1: heads 0 and 1 find values under the same name, 2 and 3 those after the same token."""
    size, content, (name, previous) = config.head_dim, _content(config), _slices(config)
    dims = _content_dims(config)
    _copy(p, config, rng, write=0.8)
    record = _orthogonal(rng, len(dims) - 2, NAME)
    for head in (0, 1):
        q = p["q_proj.weight"][head * size : (head + 1) * size]
        q[dims[:-2], name] = 1.4 * record
        p["q_proj.bias"][head * size + dims[-2:]] = 4.0
    p["k_proj.weight"][dims[:-2], name] = 1.4 * record
    p["k_proj.weight"][dims[-2:], VALUE] = 1.5
    split = len(dims) // 2
    before, who = _orthogonal(rng, split, PREVIOUS), _orthogonal(rng, len(dims) - split, NAME)
    k = p["k_proj.weight"][size:]
    k[dims[:split], previous] = 1.8 * before
    k[dims[split:], name] = 1.4 * who
    for head in (2, 3):
        q = p["q_proj.weight"][head * size : (head + 1) * size]
        q[dims[:split], :content] = 1.8 * before @ recorded
        q[dims[split:], name] = 1.4 * who


def _mimetic(p: dict[str, np.ndarray], config: ModelConfig, rng: np.random.Generator) -> None:
    """Deeper layers: each head attends to tokens like the current one, names foremost, and copies."""
    size, embed, (name, _) = config.head_dim, config.hidden_size, _slices(config)
    dims = _content_dims(config)
    _copy(p, config, rng, write=0.1)
    for group in range(config.num_kv_heads):
        same = _orthogonal(rng, len(dims), embed)
        same[:, name] *= 2
        p["k_proj.weight"][group * size + dims] = same
        for head in range(2 * group, 2 * group + 2):
            p["q_proj.weight"][head * size + dims] = same + 0.3 * _orthogonal(rng, len(dims), embed)


def _content_dims(config: ModelConfig) -> np.ndarray:
    """Dimensions of a head that RoPE hardly turns within a conversation."""
    half = config.head_dim // 2
    slow = np.arange(POSITION_PAIRS + 1, half)
    return np.concatenate([slow, slow + half])


def _copy(
    p: dict[str, np.ndarray], config: ModelConfig, rng: np.random.Generator, *, write: float
) -> None:
    """Values read a token's content; outputs write it where they read it."""
    size, content = config.head_dim, _content(config)
    for group in range(config.num_kv_heads):
        read = _orthogonal(rng, size, content)
        rows = slice(group * size, (group + 1) * size)
        p["v_proj.weight"][rows] = 0
        p["v_proj.weight"][rows, :content] = read
        for head in range(2 * group, 2 * group + 2):
            p["o_proj.weight"][:content, head * size : (head + 1) * size] = write * read.T
