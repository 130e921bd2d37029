"""The shapes of the encoders of Qwen2.5-VL and Qwen3-VL, and a picture as their inputs: windows, places, padding.

Host memory only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxpage.pictures.border import Picture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

PADDING = -1  # the window and the frame of padding


@dataclass(frozen=True, kw_only=True)
class QwenVisionConfig:
    """What the towers of both have."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    activation: str
    in_channels: int
    patch_size: int  # pixels
    frames_per_patch: int
    merge_size: int  # patches a side that become one embedding
    rope_theta: float
    initializer_range: float

    @property
    def patch_values(self) -> int:
        return self.in_channels * self.frames_per_patch * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        return self.merge_size**2

    @property
    def embedding_size(self) -> int:
        return self.out_hidden_size

    @property
    def num_patches(self) -> None:
        return None

    @property
    def most_patches(self) -> None:
        return None

    @property
    def bidirectional(self) -> bool:
        return False

    @property
    def causal_without_window(self) -> bool:
        return False

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


@dataclass(frozen=True, kw_only=True)
class Qwen25VisionConfig(QwenVisionConfig):
    """The tower of Qwen2.5-VL, whose layers attend within windows, but for some that attend within frames."""

    window_size: int  # pixels a side
    full_attention_layers: tuple[int, ...]

    @property
    def window_side(self) -> int:
        """Embeddings a side of a window."""
        return self.window_size // self.merge_size // self.patch_size

    @property
    def window_patches(self) -> int:
        """Patches of a window that is whole; those at the right and lower edge have fewer."""
        return self.window_side**2 * self.patches_per_token

    def encoder_inputs(self, picture: Picture, padded_patches: int) -> dict[str, np.ndarray]:
        """Patches in the order of windows, so that each window is one run.

        patches float32[P, patch_values]; places int32[2, P], each patch's row and column; windows and frames int32[P],
        which patches attend to each other; order int32[P / patches_per_token], where each embedding stands.
        """
        num_patches, group = len(picture.patches), self.patches_per_token
        check_padding(picture, padded_patches, group)
        windows, order = self._windows(picture.grid)  # of each embedding; embeddings by window
        patch_order = (order[:, None] * group + np.arange(group)).reshape(-1)
        patches = np.zeros((padded_patches, self.patch_values), np.float32)
        np.take(picture.patches, patch_order, axis=0, out=patches[:num_patches])
        rows, columns, frames = places_of(picture.grid, self.merge_size)
        places = np.zeros((2, padded_patches), np.int32)
        places[:, :num_patches] = rows[patch_order], columns[patch_order]
        back = np.arange(padded_patches // group, dtype=np.int32)
        back[order] = np.arange(len(order))
        return {
            "patches": patches,
            "places": places,
            "windows": padded(np.repeat(windows[order], group), padded_patches),
            "frames": padded(frames[patch_order], padded_patches),
            "order": back,
        }

    def _windows(self, grid: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
        """The window of each embedding, int[N], and the embeddings by window, int[N]."""
        num_frames, height, width = (
            grid[0],
            grid[1] // self.merge_size,
            grid[2] // self.merge_size,
        )
        side = self.window_side
        across = -(-width // side)
        down = -(-height // side)
        rows, columns = np.arange(height) // side, np.arange(width) // side
        within = rows[:, None] * across + columns
        windows = (np.arange(num_frames)[:, None, None] * (down * across) + within).reshape(-1)
        return windows, np.argsort(windows, kind="stable")


@dataclass(frozen=True, kw_only=True)
class Qwen3VisionConfig(QwenVisionConfig):
    """The tower of Qwen3-VL: attention within frames, a learned table of places, and outputs of several layers."""

    table_side: int  # of the square of learned places
    deep_layers: tuple[int, ...]  # whose outputs go to the first layers of the decoder

    @property
    def embedding_size(self) -> int:
        return self.out_hidden_size * (1 + len(self.deep_layers))

    def encoder_inputs(self, picture: Picture, padded_patches: int) -> dict[str, np.ndarray]:
        """patches float32[P, patch_values]; places int32[2, P], each patch's row and column; frames int32[P], within
        which patches attend to each other; corners int32[P, 4] and shares float32[P, 4]: learned places around that of
        the patch, and how much it takes of each.
        """
        num_patches = len(picture.patches)
        check_padding(picture, padded_patches, self.patches_per_token)
        patches = np.zeros((padded_patches, self.patch_values), np.float32)
        patches[:num_patches] = picture.patches
        rows, columns, frames = places_of(picture.grid, self.merge_size)
        places = np.zeros((2, padded_patches), np.int32)
        places[:, :num_patches] = rows, columns
        _, height, width = picture.grid
        row_taps, row_shares = self._taps(rows, height)
        column_taps, column_shares = self._taps(columns, width)
        corners = np.zeros((padded_patches, 4), np.int32)
        shares = np.zeros((padded_patches, 4), np.float32)
        cells = row_taps[:, :, None] * self.table_side + column_taps[:, None, :]
        corners[:num_patches] = cells.reshape(-1, 4)
        shares[:num_patches] = (row_shares[:, :, None] * column_shares[:, None, :]).reshape(-1, 4)
        return {
            "patches": patches,
            "places": places,
            "frames": padded(frames, padded_patches),
            "corners": corners,
            "shares": shares,
        }

    def _taps(self, index: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Cells of the table beside each index of an axis of `size` patches that spans it, [P, 2], and their shares."""
        last = self.table_side - 1
        place = index.astype(np.float32) * np.float32(last) / np.float32(max(size - 1, 1))
        floor = np.floor(place)
        share = (place - floor)[:, None]
        taps = np.minimum(floor.astype(np.int64)[:, None] + np.arange(2), last)
        return taps, np.concatenate([1 - share, share], axis=1)


def shared_fields(hf: PretrainedConfig) -> dict[str, Any]:
    """The fields of `QwenVisionConfig`, from the config of the tower."""
    return {
        "depth": hf.depth,
        "hidden_size": hf.hidden_size,
        "num_heads": hf.num_heads,
        "intermediate_size": hf.intermediate_size,
        "out_hidden_size": hf.out_hidden_size,
        "activation": hf.hidden_act,
        "in_channels": hf.in_channels,
        "patch_size": hf.patch_size,
        "frames_per_patch": hf.temporal_patch_size,
        "merge_size": hf.spatial_merge_size,
        "rope_theta": hf.rope_parameters["rope_theta"],
        "initializer_range": hf.initializer_range,
    }


def check_padding(picture: Picture, padded_patches: int, group: int) -> None:
    """Raises ValueError for a padded size that is no multiple of `group`, or too small for the picture."""
    num_patches = len(picture.patches)
    if padded_patches % group or padded_patches < num_patches:
        raise ValueError(
            f"a {picture.kind} of {num_patches} patches cannot be padded to {padded_patches}; the number must be a "
            f"multiple of {group} and not below"
        )


def places_of(grid: tuple[int, int, int], merge: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Row, column and frame of each patch, int[P], in the order of `Picture.patches`."""
    num_frames, height, width = grid
    shape = (height // merge, width // merge, merge, merge)
    rows = np.arange(height).reshape(shape[0], 1, merge, 1)
    columns = np.arange(width).reshape(1, shape[1], 1, merge)
    rows, columns = (np.broadcast_to(x, shape).reshape(-1) for x in (rows, columns))
    frames = np.repeat(np.arange(num_frames), height * width)
    return np.tile(rows, num_frames), np.tile(columns, num_frames), frames


def padded(values: np.ndarray, size: int) -> np.ndarray:
    """int32[size]: PADDING after the values."""
    found = np.full(size, PADDING, np.int32)
    found[: len(values)] = values
    return found
