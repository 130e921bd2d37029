"""Which calls execute a plan, and what is uploaded with each."""

import numpy as np

from jaxpage.plan import StepPlan
from jaxpage.runner.buckets import fitting_programs, make_buckets
from jaxpage.runner.layouts import rows_layout, step_layout
from jaxpage.runner.pack import pack


def test_blocks_change_once_in_a_step_with_a_draft_model():
    """Before the draft model writes: a block that is copied may have another owner, who has drafts too."""
    plan = StepPlan(slots=[1, 2], starts=[6, 6], num_tokens=[3, 2], samples=[True, True])
    plan.num_drafts = {0: 2, 1: 1}
    plan.block_copies, plan.table_updates = [(3, 7)], [(1, 0, 0, 7), (2, 0, 1, 8)]
    programs = fitting_programs(make_buckets(max_num_seqs=4, max_num_batched_tokens=16), plan)[0]
    bucket, names = programs.bucket, (programs.draft, programs.bucket and programs.bucket.name)
    assert bucket is not None and programs.sample is not None
    sizes = {"block_size": 8, "decode_steps": 1, "num_drafts": 2, "has_draft_model": True}
    of_step = step_layout(bucket, **sizes)
    layouts = {str(name): of_step for name in names}
    layouts[programs.sample] = rows_layout(bucket.num_rows, has_drafts=True)
    calls = pack(plan, programs, layouts)
    assert [call.program for call in calls] == [*names, programs.sample]
    draft, forward = (of_step.views(call.buffers[0]) for call in calls[:2])
    assert draft["copy_sources"][0] == 3 and draft["copy_destinations"][0] == 7
    assert draft["update_blocks"][:2].tolist() == [7, 8]
    for name in ("copy_sources", "copy_destinations", "update_slots", "update_blocks"):
        assert not forward.pop(name).any(), name
        del draft[name]
    del draft["update_groups"], draft["update_indices"]
    for name, value in draft.items():
        np.testing.assert_array_equal(forward[name], value)
