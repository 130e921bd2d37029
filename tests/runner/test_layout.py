import jax
import numpy as np

from jaxpage.runner.layout import Field, Layout

LAYOUT = Layout(
    (Field("count", ()), Field("scales", (2, 3), "float32"), Field("mask", (4,), "uint32"))
)


def test_fields_come_out_on_the_device_as_they_went_in():
    buffer = np.zeros(LAYOUT.size, np.int32)
    views = LAYOUT.views(buffer)
    views["count"][()] = -7
    views["scales"][:] = [[0.5, -1e-30, np.inf], [np.pi, 0, 1e30]]
    views["mask"][:] = [0, 1, 0x80000000, 0xFFFFFFFF]
    arrays = jax.jit(LAYOUT.unpack)(buffer)
    assert arrays.keys() == views.keys()
    for name, view in views.items():
        assert arrays[name].dtype == view.dtype
        np.testing.assert_array_equal(arrays[name], view)


def test_fields_fill_the_buffer_without_gaps_or_overlap():
    buffer = np.zeros(LAYOUT.size, np.int32)
    for view in LAYOUT.views(buffer).values():
        view.reshape(-1).view(np.int32)[:] += 1
    assert (buffer == 1).all()
