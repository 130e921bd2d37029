"""Chips to compile for, and their links: numbers from data sheets.

Knows numbers and names. Must not know jax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GIB = 2**30
_ICI_HOP = 1e-6  # seconds


@dataclass(frozen=True, kw_only=True)
class Chip:
    """One device as jax counts them (a TPU7x chip has two). Rates are peaks, from data sheets."""

    name: str
    platform: str  # "tpu" or "gpu"
    device_kind: str  # jax's name of one device
    num_bytes: int  # memory that the TPU compiler lets programs use, or jax allocates on a GPU
    bytes_per_second: float  # of that memory
    flops_per_second: float  # of bfloat16 products
    clock: float  # of a TensorCore, in Hz; 1e9 for a GPU, whose programs are estimated in ns
    link_bytes_per_second: float  # of one link between chips, in one direction
    seconds_per_step: float  # latency from one chip of a ring to the next
    seconds_per_call: float = 0.0  # additional latency of a collective
    ring_directions: int = 2  # in which a collective sends at the same time
    devices_per_chip: int = 1
    links_within_chip: int = 0  # bandwidth between the devices of a chip, as a number of links
    # Numbers in a topology. 0: there is none; a switch connects up to `most_devices` devices.
    rank: int = 2
    most_devices: int | None = None
    # Topologies of the slices that there are; in three dimensions also multiples of four, up to `most_chips` in all.
    topologies: tuple[tuple[int, ...], ...] = ()
    most_chips: int = 0
    # Of a GPU, measured: the shares of the peaks that copies and products achieve, and the time of a small kernel.
    copy_share: float = 1.0
    product_share: float = 1.0
    seconds_per_kernel: float = 0.0

    def has(self, topology: tuple[int, ...]) -> bool:
        """Whether this topology exists; for GPUs, whether a host has that many."""
        if self.rank == 0:
            return len(topology) == 1 and 0 < topology[0] <= (self.most_devices or 1)
        return topology in self.topologies or (
            len(topology) == self.rank == 3
            and all(size > 0 and size % 4 == 0 for size in topology)
            and math.prod(topology) <= self.most_chips
        )

    @property
    def description(self) -> str:
        """The topologies that there are, in words."""
        if self.rank == 0:
            return f"a host has 1 to {self.most_devices}"
        named = ", ".join("x".join(map(str, sizes)) for sizes in self.topologies)
        if self.most_chips:
            named += f", and multiples of four up to {self.most_chips:,} chips"
        return f"{self.name} slices are {named}"


# https://cloud.google.com/tpu/docs/v5e, /v6e, /v5p, /tpu7x
_SLICES_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_SLICES_3D = ((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4))

CHIPS = {
    chip.name: chip
    for chip in (
        # Google publishes no clocks. They follow from the peak and the flops per cycle of a device's MXUs: four of
        # 128 x 128 in a v5e, eight in a v5p; and 2**19 flops in a v6e and in half a TPU7x, which two MXUs of 256 x 256
        # (jax._src.tpu_info) achieve if they take two rows at a time. The compiler agrees: by the estimates of libtpu
        # 0.0.48, a product of 4096 x 4096 x 16384 achieves 97, 97, 90 and 82 % of these flops per cycle.
        # https://cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /tpu7x. They give the bandwidth of all links of a chip in
        # both directions, 400, 1200, 800 and 1200 GB/s: four links in a 2D torus, six in a 3D one. The two halves of
        # a TPU7x chip are connected six times as fast as by a link. A hop takes about a microsecond:
        # https://jax-ml.github.io/scaling-book/sharding
        Chip(
            name="v5e",
            platform="tpu",
            device_kind="TPU v5 lite",
            num_bytes=int(15.75 * GIB),
            bytes_per_second=819e9,
            flops_per_second=197e12,
            clock=197e12 / (4 * 2 * 128**2),
            link_bytes_per_second=50e9,
            seconds_per_step=_ICI_HOP,
            topologies=_SLICES_2D,
        ),
        Chip(
            name="v5p",
            platform="tpu",
            device_kind="TPU v5",
            num_bytes=int(95.73 * GIB),
            bytes_per_second=2765e9,
            flops_per_second=459e12,
            clock=459e12 / (8 * 2 * 128**2),
            link_bytes_per_second=100e9,
            seconds_per_step=_ICI_HOP,
            rank=3,
            topologies=_SLICES_3D,
            most_chips=6144,  # 16x16x24; a pod has 8,960
        ),
        Chip(
            name="v6e",
            platform="tpu",
            device_kind="TPU v6 lite",
            num_bytes=int(31.24 * GIB),
            bytes_per_second=1640e9,
            flops_per_second=918e12,
            clock=918e12 / 2**19,
            link_bytes_per_second=100e9,
            seconds_per_step=_ICI_HOP,
            topologies=_SLICES_2D,
        ),
        Chip(
            name="tpu7x",
            platform="tpu",
            device_kind="TPU7x",
            num_bytes=int(94.74 * GIB),
            bytes_per_second=3690e9,
            flops_per_second=1153e12,
            clock=1153e12 / 2**19,
            link_bytes_per_second=100e9,
            seconds_per_step=_ICI_HOP,
            devices_per_chip=2,
            links_within_chip=6,
            rank=3,
            topologies=((1, 1, 1), *_SLICES_3D),
            most_chips=9216,
        ),
        # NVIDIA H200 SXM data sheet. jax allocates three quarters of the memory that the driver reports, unless
        # XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise. NVLink has 900 GB/s in both directions together; switches
        # connect the eight GPUs of an HGX board. Latencies are those that NCCL uses to choose its algorithms (a ring
        # with the LL protocol, src/graph/tuning.cc).
        Chip(
            name="h200",
            platform="gpu",
            device_kind="NVIDIA H200",
            num_bytes=int(0.75 * 143_771 * 2**20),
            bytes_per_second=4800e9,
            flops_per_second=989e12,
            clock=1e9,
            link_bytes_per_second=450e9,
            seconds_per_step=0.6e-6,
            seconds_per_call=6.6e-6,
            ring_directions=1,
            rank=0,
            most_devices=8,
            # `jaxpage bench suite --only peaks`, 2026-11-26: 4,210 GB/s and 677 TFLOP/s. In decode steps small kernels
            # took 1.2 to 1.6 us, and the next began 0.3 us later.
            copy_share=0.87,
            product_share=0.69,
            seconds_per_kernel=2e-6,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Links:
    """A device's links to the others that it exchanges with, in a ring through all of them."""

    bytes_per_second: float  # that each device can send
    steps: int  # until all others have what a device sends
    seconds_per_step: float
    seconds_per_call: float


@dataclass(frozen=True)
class Target:
    """Some chips of one kind."""

    chip: Chip
    topology: tuple[int, ...]  # chips along each axis; () for a single chip

    @property
    def name(self) -> str:
        return ":".join(
            [self.chip.name, *(["x".join(map(str, self.topology))] * bool(self.topology))]
        )

    @property
    def num_chips(self) -> int:
        return math.prod(self.topology)

    @property
    def num_devices(self) -> int:
        return self.num_chips * self.chip.devices_per_chip

    def links(self, num_devices: int) -> Links:
        """The links between the first `num_devices` devices.

        A small slice is a mesh, not a torus: a chip in its corner, which all others wait for, has one link per axis.
        """
        chip = self.chip
        num_chips = -(-num_devices // chip.devices_per_chip)
        if chip.rank == 0:
            num_links = 1
        elif num_chips == 1:
            num_links = max(1, chip.links_within_chip)
        else:
            num_axes = sum(size > 1 for size in self.topology)
            num_links = min(num_axes, num_chips.bit_length() - 1)
        return Links(
            bytes_per_second=num_links * chip.link_bytes_per_second,
            steps=-(-(num_devices - 1) // chip.ring_directions),
            seconds_per_step=chip.seconds_per_step,
            seconds_per_call=chip.seconds_per_call,
        )


def parse_target(text: str) -> Target:
    """ "v6e:2x2", "tpu7x:2x2x1", "h200" or "h200:8". Raises ValueError for anything else."""
    name, _, topology = text.strip().lower().partition(":")
    if name not in CHIPS:
        raise ValueError(f"no chip {name!r}; there are {', '.join(CHIPS)}")
    chip = CHIPS[name]
    if not topology and chip.rank == 0:
        return Target(chip, ())
    sizes = topology.split("x")
    if len(sizes) != max(1, chip.rank) or not all(map(str.isdecimal, sizes)):
        example = f"{name}:{chip.most_devices or 'x'.join('221'[: chip.rank])}"
        raise ValueError(f"{text!r} is not a target with this chip; write it like {example}")
    target = Target(chip, tuple(map(int, sizes)))
    if not chip.has(target.topology):
        raise ValueError(f"there is no {target.name}; {chip.description}")
    return target
