"""Pictures of prompts and conversations, prepared for one model within the limits of one engine.

Knows the family's processor and what may be in a prompt. Must not know requests or the engine. Several threads may call
it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpage.pictures.border import Picture, PictureProcessor
from jaxpage.pictures.messages import Media, load_media, prompt_pictures
from jaxpage.pictures.options import KINDS, most_of
from jaxpage.pictures.prompt import PromptPictures
from jaxpage.pictures.sources import MediaSources


@dataclass(frozen=True, kw_only=True)
class PictureReader:
    """What reads the pictures of prompts."""

    processor: PictureProcessor
    sources: MediaSources
    limit_mm_per_prompt: Mapping[str, Any] | None
    most_patches: int  # of a picture
    most_tokens: int  # of all pictures of a prompt

    def load(self, messages: Sequence[Any]) -> list[Any]:
        """A conversation whose pictures are `MediaPart`s. May take long: URLs are read. Raises ValueError."""
        return load_media(messages, self.sources.read, _Counted(self))

    def of_prompt(self, multi_modal_data: Any) -> list[Picture]:
        """The pictures of a prompt's "multi_modal_data". Raises ValueError."""
        return prompt_pictures(multi_modal_data, _Counted(self))

    def expand(
        self, token_ids: Sequence[int], pictures: Sequence[Picture]
    ) -> tuple[list[int], PromptPictures]:
        """A prompt with the placeholders of its pictures. Raises ValueError if their numbers do not match."""
        expanded = self.processor.expand(list(token_ids), pictures)
        return expanded.token_ids, PromptPictures.of(expanded, pictures)

    def most(self, kind: str) -> int:
        """How many of a kind a prompt may have."""
        return most_of(self.limit_mm_per_prompt, kind)


@dataclass
class _Counted:
    """Prepares the pictures of one prompt, as long as they are few enough and fit the longest sequence."""

    reader: PictureReader
    counts: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0

    def __call__(self, media: Media) -> Picture:
        reader, kind = self.reader, media.kind
        assert kind in KINDS
        self.counts[kind] += 1
        if self.counts[kind] > reader.most(kind):
            raise ValueError(
                f"a prompt may have {reader.most(kind)} of kind {kind!r}, see limit_mm_per_prompt"
            )
        if kind == "image":
            picture = reader.processor.image(media.frames[0])
        else:
            picture = reader.processor.video(media.frames, fps=media.fps)
        num_patches = max(len(part.patches) for part in picture.parts)
        if num_patches > reader.most_patches:
            raise ValueError(
                f"it has {num_patches} patches, the largest encoder takes {reader.most_patches}; make it "
                'smaller, or have pictures made smaller with mm_processor_kwargs, such as {"max_pixels": ...} of Qwen '
                'and {"size": {"longest_edge": ...}} of Mistral'
            )
        self.num_tokens += sum(part.num_tokens for part in picture.parts)
        if self.num_tokens >= reader.most_tokens:
            raise ValueError(
                f"up to here pictures take {self.num_tokens} tokens, max_model_len is {reader.most_tokens}; "
                "give fewer or smaller ones, or raise max_model_len"
            )
        return picture
