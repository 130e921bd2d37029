"""What is drawn is the data: every test reads it back from the axes."""

from __future__ import annotations

import numpy as np
import pytest

from jaxpage import plots
from jaxpage.engine.snapshot import take_snapshot
from tests.engine.harness import make_engine
from tests.fakes import make_request

TABLE = list(range(12)) * 2  # six blocks of 4
QUESTIONS = ([1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [7, 8, 9, 10, 11])


@pytest.fixture(autouse=True)
def plt():
    """`matplotlib.pyplot` without a window. Imported here and below: each process collects all tests and runs some."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


def to_rgba(colour):
    from matplotlib.colors import to_rgba

    return to_rgba(colour)


def record(engine, *requests):
    """(stats, snapshots) after each step."""
    for request in requests:
        engine.add(request)
    stats, snapshots = [], []
    while engine.has_unfinished_requests():
        engine.step()
        stats.append(engine.stats())
        snapshots.append(take_snapshot(engine.scheduler))
    return stats, snapshots


def samples():
    return make_request("a", TABLE[:10], n=3, max_tokens=6, ignore_eos=True)


def texts(ax):
    return {tuple(np.round(t.get_position(), 3)): t.get_text() for t in ax.texts}


def test_occupancy_draws_what_is_held_what_it_would_be_and_what_there_is():
    stats, _ = record(make_engine(num_blocks=20), samples())
    ax = plots.occupancy(stats)
    (area,) = ax.collections
    without_sharing, pool = ax.get_lines()
    assert without_sharing.get_xdata().tolist() == [s.num_steps for s in stats]
    drawn = without_sharing.get_ydata().tolist()
    assert drawn == [s.num_block_references for s in stats] and drawn[0] == 9
    assert set(pool.get_ydata()) == {19}
    outline = set(map(tuple, area.get_paths()[0].vertices.tolist()))
    assert {(s.num_steps, s.num_blocks_used) for s in stats} <= outline
    assert max(y for _, y in outline) == max(s.num_blocks_used for s in stats)


def test_sharing_draws_each_block_of_each_sequence_and_tells_shared_ones():
    _, snapshots = record(make_engine(num_blocks=20), samples())
    shot = snapshots[1]  # the last blocks were copied, the first two are shared
    assert (shot.references[shot.block_tables] > 1).tolist() == [[True, True, False]] * 3
    ax = plots.sharing(shot)
    (mesh,) = ax.collections
    mesh.update_scalarmappable()
    wanted = [to_rgba(plots.SHARED), to_rgba(plots.SHARED), to_rgba(plots.OWN)] * 3
    np.testing.assert_allclose(mesh.get_facecolors().reshape(-1, 4), wanted)
    assert texts(ax) == {
        (column, row): str(block_id)
        for (row, column), block_id in np.ndenumerate(shot.block_tables)
    }
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a.0", "a.1", "a.2"]


def test_sharing_leaves_out_what_a_shorter_sequence_does_not_have():
    engine = make_engine(num_blocks=20)
    for name, length in (("long", 9), ("short", 3)):
        engine.add(make_request(name, TABLE[:length], max_tokens=3))
    engine.step()
    ax = plots.sharing(take_snapshot(engine.scheduler))
    assert ax.collections[0].get_array().mask.tolist() == [[False] * 3, [False, True, True]]
    assert len(ax.texts) == 4


def test_sharing_shows_what_was_swapped_out():
    engine = make_engine(num_blocks=7, num_host_blocks=5, preemption_mode="swap")
    for name, length in (("a", 10), ("b", 6)):
        engine.add(make_request(name, TABLE[:length], max_tokens=9, ignore_eos=True))
    while len(engine.scheduler.running) < 2:
        engine.step()
    while len(engine.scheduler.running) == 2:
        engine.step()
    ax = plots.sharing(take_snapshot(engine.scheduler))
    (mesh,) = ax.collections
    mesh.update_scalarmappable()
    colours = mesh.get_facecolors().reshape(2, -1, 4)
    np.testing.assert_allclose(colours[1, 0], to_rgba(plots.HOST))
    np.testing.assert_allclose(colours[0, -1], to_rgba(plots.OWN))
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a.0", "b.0"]


def test_sharing_of_an_idle_engine_is_empty():
    ax = plots.sharing(take_snapshot(make_engine().scheduler))
    assert not ax.collections and not ax.texts


def test_prefix_tree_draws_a_dot_for_each_block_and_its_hits():
    engine = make_engine(num_blocks=40)
    for number, question in enumerate(QUESTIONS):
        record(engine, make_request(str(number), TABLE[:8] + question, max_tokens=1))
    ax = plots.prefix_tree(take_snapshot(engine.scheduler))
    lines, dots = ax.collections
    # Two blocks of table, hit by two later questions; two different blocks after them, one hit once.
    assert sorted(map(tuple, dots.get_offsets().tolist())) == [(0, 0.5), (1, 0.5), (2, 0), (2, 1)]
    hits = dict(
        zip(map(tuple, dots.get_offsets().tolist()), dots.get_array().tolist(), strict=True)
    )
    assert hits == {(0, 0.5): 2, (1, 0.5): 2, (2, 0): 1, (2, 1): 0}
    edges = sorted((s[0].tolist(), s[-1].tolist()) for s in lines.get_segments())
    assert edges == [([0, 0.5], [1, 0.5]), ([1, 0.5], [2, 0]), ([1, 0.5], [2, 1])]
    counts = {tuple(note.xy): note.get_text() for note in ax.texts}
    assert counts == {(0, 0.5): "2", (2, 0): "1", (2, 1): "0"}


def test_prefix_tree_of_different_beginnings_has_a_root_for_each_and_may_be_deep():
    engine = make_engine(num_blocks=1500, max_model_len=5000, max_num_batched_tokens=5000)
    record(
        engine,
        make_request("a", [1] * 4400, max_tokens=1),
        make_request("b", [2] * 9, max_tokens=1),
    )
    _, dots = plots.prefix_tree(take_snapshot(engine.scheduler)).collections
    places = set(map(tuple, dots.get_offsets().tolist()))
    assert places == {(depth, 0) for depth in range(1100)} | {(0, 1), (1, 1)}


def test_prefix_tree_of_an_empty_cache_is_empty():
    ax = plots.prefix_tree(take_snapshot(make_engine().scheduler))
    lines, dots = ax.collections
    assert not lines.get_segments() and not len(dots.get_offsets()) and not ax.texts


def test_waste_draws_the_share_of_each_cause_on_top_of_the_other():
    engine = make_engine(max_num_batched_tokens=5)
    _, snapshots = record(engine, make_request("a", TABLE[:18], max_tokens=4, ignore_eos=True))
    ax = plots.waste(snapshots)
    partial, ahead = ax.collections
    for area, causes in ((partial, ["partial"]), (ahead, ["partial", "ahead"])):
        outline = area.get_paths()[0].vertices.tolist()
        for shot in snapshots:
            unused = sum(shot.unused_slots[cause] for cause in causes)
            height = 100 * unused / max(shot.num_allocated_slots, 1)
            assert [shot.num_steps, pytest.approx(height)] in outline
    assert snapshots[0].unused_slots == {"partial": 3, "ahead": 12}
    assert [text.get_text() for text in ax.get_legend().get_texts()] == list(plots.CAUSES.values())


def test_axes_that_are_given_are_drawn_into(plt):
    stats, snapshots = record(make_engine(num_blocks=20), samples())
    _, axes = plt.subplots(1, 4)
    assert plots.occupancy(stats, axes[0]) is axes[0]
    assert plots.sharing(snapshots[0], axes[1]) is axes[1]
    assert plots.prefix_tree(snapshots[-1], axes[2]) is axes[2]
    assert plots.waste(snapshots, axes[3]) is axes[3]
