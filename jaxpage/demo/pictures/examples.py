"""From scenes to training batches: the tokenizer, conversations about a picture, and pictures as patches."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from jaxpage.demo import text, tokens
from jaxpage.demo.pictures import network, questions, scenes
from jaxpage.demo.pictures.network import IMAGE, NUM_TOKENS, VISION_END, VISION_START, Batch
from jaxpage.pictures.border import Picture
from jaxpage.pictures.mrope import mrope_positions
from jaxpage.pictures.qwen_vl import QwenVLProcessor, qwen2_5_vl_processor
from jaxpage.pictures.settings import ProcessorSettings
from jaxpage.tiny import IM_END, IM_START, SPECIAL_TOKENS, train_byte_level_bpe

PROCESSOR: dict[str, Any] = {  # preprocessor_config.json
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 8,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": scenes.SIDE**2,
    "max_pixels": scenes.SIDE**2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
LENGTH = 256  # of a training row
_PICTURE = f"{VISION_START}{IMAGE * NUM_TOKENS}{VISION_END}"
_NO_PICTURE = 0.06  # share of the conversations
_ANSWER_TOKENS = 130  # of a training row, at most

Example = tuple[scenes.Scene | None, str]  # a picture, if any, and a conversation


def train_tokenizer() -> Tokenizer:
    """The tokenizer of the model; the tokens around pictures come last."""
    rng = random.Random(0)
    texts = questions.every_text() * 30
    texts += [example(rng)[1] for _ in range(1500)]
    for special in (*SPECIAL_TOKENS, *network.VISION_TOKENS):
        texts = [one.replace(special, "") for one in texts]
    tokenizer = train_byte_level_bpe(texts, vocab_size=1024, min_frequency=5)
    tokenizer.add_special_tokens([AddedToken(x, special=True) for x in network.VISION_TOKENS])
    return tokenizer


def said(turns: Sequence[questions.Turn | text.Turn], *, picture: bool, first: bool = True) -> str:
    """A conversation as the chat template writes it, with the picture before or after the first question."""
    parts = []
    for index, turn in enumerate(turns):
        asked = turn.question
        if picture and index == 0:
            asked = f"{_PICTURE}{asked}" if first else f"{asked}{_PICTURE}"
        parts.append(
            f"{IM_START}user\n{asked}{IM_END}\n{IM_START}assistant\n{turn.answer}{IM_END}\n"
        )
    return "".join(parts)


def example(rng: random.Random) -> Example:
    """A picture with as many questions as fit in a row, or some small talk."""
    if rng.random() < _NO_PICTURE:
        return None, said([text.talk(rng) for _ in range(6)], picture=False)
    scene = scenes.scene(rng)
    turns = [turn for _ in range(9) if (turn := questions.ask(rng, scene)) is not None]
    return scene, said(turns, picture=True, first=rng.random() < 0.8)


def pack(tokenizer: Tokenizer, examples: Iterable[Example], *, length: int, selected: int) -> Batch:
    """Examples as rows of `length` tokens, cut or padded, with at most `selected` targets."""
    pairs = list(examples)
    rows = tokens.pack(tokenizer, [text for _, text in pairs], length, selected)
    pictures = [None if scene is None else patches_of(scene) for scene, _ in pairs]
    image = tokenizer.token_to_id(IMAGE)
    positions = np.stack([_positions(ids, image) for ids in rows.tokens], axis=1)
    config = network.model_config(tokenizer.get_vocab_size())
    assert config.vision is not None
    blank = np.zeros((network.NUM_PATCHES, config.vision.patch_values), np.float32)
    patches = [
        blank if p is None else config.vision.encoder_inputs(p, network.NUM_PATCHES)["patches"]
        for p in pictures
    ]
    return Batch(*rows, positions=positions, patches=np.stack(patches))


def training_batch(tokenizer: Tokenizer, *, rows: int, seed: int, step: int) -> Batch:
    """The batch of one step; a function of the arguments."""
    rng = random.Random(f"pictures {seed}/{step}")
    found = [example(rng) for _ in range(rows)]
    return pack(tokenizer, found, length=LENGTH, selected=rows * _ANSWER_TOKENS)


@functools.cache
def processor() -> QwenVLProcessor:
    """The processor that cuts pictures into patches, as in the engine."""
    settings = ProcessorSettings(image=PROCESSOR, video=PROCESSOR)
    return qwen2_5_vl_processor(network.hf_config(1024), settings)


def patches_of(scene: scenes.Scene) -> Picture:
    picture = processor().image(scenes.draw(scene))
    assert picture.grid == network.GRID
    return picture


_BLANK = Picture(
    patches=np.zeros((0, 0), np.float32),
    grid=network.GRID,
    num_tokens=NUM_TOKENS,
    content_hash=b"",
)


def _positions(ids: np.ndarray, image: int | None) -> np.ndarray:
    """int32[3, T] of a row with at most one picture."""
    found = np.flatnonzero(ids == image)
    spans = [(int(found[0]), NUM_TOKENS)] if len(found) else []
    merge = PROCESSOR["merge_size"]
    positions, _ = mrope_positions(
        len(ids), spans, [_BLANK] * len(spans), merge_size=merge, tokens_per_second=2
    )
    return positions
