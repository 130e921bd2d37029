"""Gemma 3 on the host: pictures to patches, prompts with begin and end of each picture, and the encoder's inputs.

Every picture is resized to one square; with pan and scan, so are crops of it. Values are those of transformers'
Gemma3ImageProcessor. Knows no array on a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.pictures.border import Expanded, Picture, Pixels
from jaxpage.pictures.pan_and_scan import DEFAULTS, PanAndScan, pan_and_scan
from jaxpage.pictures.pixels import Normalisation, content_hash, resized, rgb
from jaxpage.pictures.placeholders import expand_placeholders
from jaxpage.pictures.qwen_vision import PADDING, check_padding
from jaxpage.pictures.settings import ProcessorSettings

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HALVES = (0.5, 0.5, 0.5)
_BILINEAR = 2
# What stands around a picture; with crops, before it, and before the first of them.
_AROUND = "\n\n"
_BEFORE = "Here is the original image "
_BETWEEN = " and here are some crops to help you see better "
_MOST_NEWLINES = 32  # in one token, as Gemma's vocabulary has them


@dataclass(frozen=True, kw_only=True)
class SiglipConfig:
    """A SigLIP tower over one square picture, and the pooling of its patches to embeddings."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    activation: str
    in_channels: int
    image_size: int  # pixels a side
    patch_size: int  # pixels a side
    pool_size: int  # patches a side that become one embedding
    norm_eps: float
    initializer_range: float

    @property
    def side(self) -> int:
        """Patches a side."""
        return self.image_size // self.patch_size

    @property
    def patch_values(self) -> int:
        return self.in_channels * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.pool_size**2

    @property
    def embedding_size(self) -> int:
        return self.out_hidden_size

    @property
    def num_patches(self) -> int:
        return self.side**2

    @property
    def most_patches(self) -> None:
        return None

    @property
    def bidirectional(self) -> bool:
        return True

    @property
    def causal_without_window(self) -> bool:
        return False

    @property
    def num_tokens(self) -> int:
        """Embeddings of a picture."""
        return (self.side // self.pool_size) ** 2

    def patches(self, pixels: np.ndarray) -> np.ndarray:
        """float32[P, patch_values] of float32[image_size, image_size, 3]; patches that are pooled follow each other."""
        blocks = (self.side // self.pool_size, self.pool_size, self.patch_size)
        values = pixels.reshape(*blocks, *blocks, self.in_channels).transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(values).reshape(self.side**2, self.patch_values)

    def encoder_inputs(self, picture: Picture, padded_patches: int) -> dict[str, np.ndarray]:
        """patches float32[P, patch_values]; places int32[P], rows of the table of positions; segments int32[P]."""
        num_patches = len(picture.patches)
        check_padding(picture, padded_patches, self.patches_per_token)
        patches = np.zeros((padded_patches, self.patch_values), np.float32)
        patches[:num_patches] = picture.patches
        blocks = (self.side // self.pool_size, self.pool_size)
        table = np.arange(self.side**2).reshape(*blocks, *blocks).transpose(0, 2, 1, 3)
        places = np.zeros(padded_patches, np.int32)
        places[:num_patches] = table.reshape(-1)[:num_patches]
        segments = np.full(padded_patches, PADDING, np.int32)
        segments[:num_patches] = 0
        return {"patches": patches, "places": places, "segments": segments}


@dataclass(frozen=True)
class Words:
    """A tokenizer that puts words before and after tokens."""

    tokenizer: Any

    def around(self, before: str, token_ids: list[int], after: str) -> list[int]:
        """The ids of a text between two others, as if all three were tokenised together.

        Ids that the tokenizer would not give to their text stay as they are, and so do those beyond a special token.
        """
        special = set(self.tokenizer.all_special_ids)
        where = [i for i, token_id in enumerate(token_ids) if token_id in special]
        if where and before and after:
            first = where[0] + 1
            head = self.around(before, token_ids[:first], "")
            return head + self.around("", token_ids[first:], after)
        start, stop = 0, len(token_ids)
        if where and before:
            stop = where[0]
        elif where:
            start = where[-1] + 1
        text = self.tokenizer.decode(token_ids[start:stop])
        if self._encode(text) == token_ids[start:stop]:
            joined = self._encode(before + text + after)
        else:
            joined = self._encode(before) + token_ids[start:stop] + self._encode(after)
        return token_ids[:start] + joined + token_ids[stop:]

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)


@dataclass(frozen=True, kw_only=True)
class Gemma3Processor:
    """The `PictureProcessor` of Gemma 3."""

    config: SiglipConfig
    resample: int
    normalisation: Normalisation
    image_token_id: int
    begin_token_id: int
    end_token_id: int
    # Token of a run of newlines, by its length; what stands around a picture joins the newlines beside it.
    newlines: Mapping[int, int]
    pan_and_scan: PanAndScan | None = None
    words: Words | None = None  # None: there is no tokenizer

    def image(self, pixels: Pixels) -> Picture:
        array = rgb(pixels)
        crops = [] if self.pan_and_scan is None else self.pan_and_scan.crops(array)
        return replace(self._square(array), crops=tuple(self._square(crop) for crop in crops))

    def _square(self, array: np.ndarray) -> Picture:
        config = self.config
        square = resized(array, config.image_size, config.image_size, self.resample)
        return Picture(
            patches=config.patches(self.normalisation(square)),
            grid=(1, config.side, config.side),
            num_tokens=config.num_tokens,
            content_hash=content_hash([array], "gemma3", config, self.resample, self.normalisation),
        )

    def video(self, frames: Sequence[Pixels], *, fps: float) -> Picture:
        raise ValueError("Gemma 3 takes no videos; give some frames as pictures")

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> Expanded:
        """`begin_token_id` stands for a picture, as in chat templates; placeholders that are there already stay."""
        has_crops = any(picture.crops for picture in pictures)
        if self.image_token_id not in token_ids:
            token_ids = (
                self._with_crops(token_ids, pictures) if has_crops else self._with_ends(token_ids)
            )
        parts = [part for picture in pictures for part in picture.parts]
        if has_crops and token_ids.count(self.image_token_id) == len(pictures):
            raise ValueError(
                f"with do_pan_and_scan the {len(pictures)} pictures are {len(parts)}, crops included: give a begin "
                f"({self.begin_token_id}) alone for each picture, or a placeholder ({self.image_token_id}) for each "
                "picture and each crop"
            )
        ids = {"image": self.image_token_id}
        expanded, spans = expand_placeholders(token_ids, parts, ids)
        ends = {first + number for first, number in spans}
        touching = next((first for first, _ in spans if first in ends), None)
        if touching is not None:
            raise ValueError(
                f"two pictures touch at token {touching} of the prompt, where Gemma 3 would see one; put their end "
                f"({self.end_token_id}) and the next one's begin ({self.begin_token_id}) between them"
            )
        return Expanded(
            token_ids=expanded, spans=spans, positions=None, next_position=len(expanded)
        )

    def _with_ends(self, token_ids: list[int]) -> list[int]:
        """Two newlines, begin, placeholder, end, two newlines, in the place of each begin.

        They join newlines beside them to one token, as in a text that is tokenised with both.
        """
        if self.begin_token_id not in token_ids:
            return token_ids
        if 2 not in self.newlines:
            raise ValueError(
                "no token of two newlines is known, which stand around a picture in Gemma 3's prompts; use the "
                f"tokenizer of the checkpoint, or give a placeholder ({self.image_token_id}) for each picture"
            )
        around, found = self.newlines[2], list[int]()
        joins = False  # whether a picture's newlines are the last token
        for token_id in token_ids:
            if token_id == self.begin_token_id:
                self._join(found, around)
                found += [token_id, self.image_token_id, self.end_token_id, around]
                joins = True
            elif joins:
                self._join(found, token_id)
                joins = False
            else:
                found.append(token_id)
        return found

    def _with_crops(self, token_ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        """The same with words before the crops of a picture, all of it tokenised with the texts around it."""
        if token_ids.count(self.begin_token_id) != len(pictures):
            return token_ids  # which `expand_placeholders` refuses
        if self.words is None:
            raise ValueError(
                "do_pan_and_scan puts words before crops and needs the tokenizer, skip_tokenizer_init=True; give a "
                f"placeholder ({self.image_token_id}) for each picture and each crop"
            )
        begin, placeholder, end = self.begin_token_id, self.image_token_id, self.end_token_id
        texts, rest = list[list[int]](), list(token_ids)
        while begin in rest:
            at = rest.index(begin)
            texts.append(rest[:at])
            rest = rest[at + 1 :]
        found, after = list[int](), ""
        for text, picture in zip(texts, pictures, strict=True):
            before = (_BEFORE if picture.crops else "") + _AROUND
            found += [*self.words.around(after, text, before), begin, placeholder, end]
            for index in range(len(picture.crops)):
                between = _AROUND + (" " if index else _BETWEEN) + _AROUND
                found += [*self.words.around(between, [], ""), begin, placeholder, end]
            after = _AROUND
        return found + self.words.around(after, rest, "")

    def _join(self, found: list[int], token_id: int) -> None:
        """Add a token; if it and the last one are newlines, as one."""
        lengths = {token: length for length, token in self.newlines.items()}
        together = lengths.get(token_id, 0) + lengths.get(found[-1], 0) if found else 0
        if found and token_id in lengths and found[-1] in lengths and together in self.newlines:
            found[-1] = self.newlines[together]
        else:
            found.append(token_id)


def gemma3_processor(
    hf: PretrainedConfig,
    settings: ProcessorSettings,
    *,
    tokenizer: Any = None,
    options: Mapping[str, Any] | None = None,
) -> Gemma3Processor:
    """The processor of a Gemma3Config. Raises ValueError for options and settings that cannot be served."""
    told = settings.image | dict(options or {})
    unknown = sorted(set(options or {}) - set(DEFAULTS))
    if unknown:
        raise ValueError(
            f"options of the picture processor: {', '.join(unknown)} unknown; known are {', '.join(DEFAULTS)}"
        )
    config = siglip_config(hf)
    size = told.get("size") or {}
    if any(size.get(side, config.image_size) != config.image_size for side in ("height", "width")):
        raise ValueError(
            f"the picture processor resizes to {size}, the vision tower wants {config.image_size} pixels a side; "
            "correct preprocessor_config.json"
        )
    return Gemma3Processor(
        config=config,
        resample=told.get("resample", _BILINEAR),
        normalisation=Normalisation(
            scale=told.get("rescale_factor", 1 / 255),
            mean=tuple(told.get("image_mean") or _HALVES),
            std=tuple(told.get("image_std") or _HALVES),
        ),
        image_token_id=hf.image_token_id,
        begin_token_id=hf.boi_token_id,
        end_token_id=hf.eoi_token_id,
        newlines=_newlines(tokenizer),
        pan_and_scan=pan_and_scan(told),
        words=None if tokenizer is None else Words(tokenizer),
    )


def _newlines(tokenizer: Any) -> dict[int, int]:
    vocabulary = {} if tokenizer is None else tokenizer.get_vocab()
    lengths = range(1, _MOST_NEWLINES)
    return {n: vocabulary["\n" * n] for n in lengths if "\n" * n in vocabulary}


def siglip_config(hf: PretrainedConfig) -> SiglipConfig:
    """The shape of the encoder of a Gemma3Config. Raises ValueError for what cannot be served."""
    vision, text = hf.vision_config, hf.get_text_config()
    side = vision.image_size // vision.patch_size
    tokens_per_side = int(hf.mm_tokens_per_image**0.5)
    if side * vision.patch_size != vision.image_size or side % tokens_per_side:
        raise ValueError(
            f"a picture of {vision.image_size} pixels a side in patches of {vision.patch_size} does not pool evenly "
            f"to {hf.mm_tokens_per_image} embeddings; correct config.json"
        )
    if vision.hidden_size % vision.num_attention_heads:
        raise ValueError(
            f"the vision tower has {vision.num_attention_heads} heads for hidden_size {vision.hidden_size}, which does "
            "not divide evenly; correct config.json"
        )
    return SiglipConfig(
        depth=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        num_heads=vision.num_attention_heads,
        intermediate_size=vision.intermediate_size,
        out_hidden_size=text.hidden_size,
        activation=vision.hidden_act,
        in_channels=vision.num_channels,
        image_size=vision.image_size,
        patch_size=vision.patch_size,
        pool_size=side // tokens_per_side,
        norm_eps=vision.layer_norm_eps,
        initializer_range=text.initializer_range,
    )
