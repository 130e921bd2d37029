"""What the engine and a model family exchange about pictures: plain values and two protocols, all on the host.

Knows neither jax nor any family. A processor turns pixels into a `Picture` and a prompt into an `Expanded` one; a
`VisionConfig` turns a `Picture` into the arrays that the family's encoder takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

    Pixels = np.ndarray | Image
else:
    # An image of any mode; transparency is put on white. An array: uint8[height, width, 3].
    Pixels = "np.ndarray | PIL.Image.Image"


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture or one video, ready for the encoder."""

    patches: np.ndarray  # float32[P, patch_values], in the encoder's order
    grid: tuple[int, int, int]  # (frames, height, width) in patches; their product is P
    num_tokens: int  # in the prompt: one for each embedding, and `breaks`
    # Of the decoded pixels and of everything the processor was told; 32 bytes.
    content_hash: bytes
    second_per_grid: float | None = None  # of videos: seconds from one row of frames to the next
    kind: str = "image"  # or "video"
    # Of a video whose frames stand apart in prompts: each row of them as a picture of its own, and its time in seconds.
    frames: tuple[Picture, ...] = ()
    times: tuple[float, ...] = ()
    # Which of its tokens, counted from its first, have no embedding of the encoder: they end rows, and are text.
    breaks: tuple[int, ...] = ()
    # Parts of a picture that are shown beside it, each as a picture of its own; `num_tokens` is without them.
    crops: tuple[Picture, ...] = ()

    @property
    def num_embeddings(self) -> int:
        """What the encoder makes of it."""
        return self.num_tokens - len(self.breaks)

    @property
    def parts(self) -> tuple[Picture, ...]:
        """What is encoded of it, each part with a span of its own."""
        return self.frames or (self, *self.crops)


@dataclass(frozen=True, kw_only=True)
class Expanded:
    """A prompt whose pictures have their placeholders."""

    # Each picture's placeholder for each of its embeddings, with what the family puts between and around them.
    token_ids: list[int]
    # (first token, `num_tokens`) of each part of each picture, in the order of the pictures.
    spans: tuple[tuple[int, int], ...]
    positions: np.ndarray | None  # int32[3, T] of families with mrope, else None: 0 .. T - 1
    next_position: int  # of the first generated token; it is T where positions are None


class PictureProcessor(Protocol):
    """A family's preparation of pictures and prompts. Without state; safe to call from several threads."""

    def image(self, pixels: Pixels) -> Picture:
        """Resize, normalise and cut into patches. Raises ValueError for sizes that the family refuses."""
        ...

    def video(self, frames: Sequence[Pixels], *, fps: float) -> Picture:
        """The same of frames sampled `fps` times a second. Raises ValueError; also where the family has no videos."""
        ...

    def expand(self, token_ids: list[int], pictures: Sequence[Picture]) -> Expanded:
        """Give the pictures their placeholders. Those of one kind come in the order of the prompt.

        The prompt has one placeholder for each, or already all of them. Raises ValueError if the numbers do not match.
        """
        ...


class VisionConfig(Protocol):
    """What is known of a family's encoder without its weights. Hashable."""

    @property
    def patch_values(self) -> int:
        """Values of a patch, the last axis of `Picture.patches`."""
        ...

    @property
    def patches_per_token(self) -> int:
        """Patches that become one embedding. Padded sizes must be multiples of it."""
        ...

    @property
    def embedding_size(self) -> int:
        """Values of an embedding: the decoder's hidden_size, or a multiple of it (`ForwardInput.embeds`)."""
        ...

    @property
    def num_patches(self) -> int | None:
        """Patches of every picture, None if they differ in size."""
        ...

    @property
    def most_patches(self) -> int | None:
        """Patches of the largest picture that the model knows, None if there is no such limit."""
        ...

    @property
    def bidirectional(self) -> bool:
        """Whether the tokens of a picture see each other in the decoder, so that all of them are computed together."""
        ...

    @property
    def causal_without_window(self) -> bool:
        """Whether layers without a sliding window are causal even so."""
        ...

    def encoder_inputs(self, picture: Picture, padded_patches: int) -> dict[str, np.ndarray]:
        """What the encoder, the model's `visual`, takes for one picture, padded to `padded_patches` patches.

        `patches` float32[P, patch_values], and integer arrays. Names, shapes and dtypes depend on `padded_patches`
        only. Raises ValueError if the picture has more patches.

        `visual(**inputs)` is [P // patches_per_token, embedding_size] in the model's dtype, in the order of the
        placeholders. Rows from the picture's `num_embeddings` on belong to padding; they are finite and mean nothing.
        Padding does not change the others.
        """
        ...
