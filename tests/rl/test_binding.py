"""Live modules of any layout as an engine reads them, without an engine."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxpage.config import EngineConfig
from jaxpage.engine_spec import make_engine_spec
from jaxpage.models.attention import DenseAttention
from jaxpage.models.inputs import ForwardInput
from jaxpage.rl.binding import Binding
from jaxpage.rl.view import TrainerView
from jaxpage.weights.spec import variables
from tests.rl.modules import OPTIONS, Holder, in_layout, make_module, write_config


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def module(path):
    return make_module(path)


def prepared(module, path, **options):
    config = EngineConfig.from_options(model=str(path), dtype="float32", **(OPTIONS | options))
    spec = make_engine_spec(config, device=jax.local_devices()[0])
    spec.transform_weights(join=False)
    binding = Binding(module)
    return binding, binding.prepare(spec)


def test_our_own_module_is_read_as_it_is(module, path):
    binding, _ = prepared(module, path)
    with jax.transfer_guard("disallow_explicit"):
        assert binding.refresh() == 0
    assert binding.trainer == "NNX"
    ours = variables(module)
    assert {id(each) for each in binding.variables} == {id(each) for each in ours.values()}


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["tunix", "maxtext", "maxtext stacked"])
def test_a_trainers_module_is_read_as_it_is_and_computes_the_same(module, path, layout):
    theirs = Holder(in_layout(layout, module, path))
    binding, spec = prepared(theirs, path)
    assert isinstance(spec.model, TrainerView) and binding.trainer.lower() in layout
    assert binding.refresh() == 0
    names = {id(each) for _, each in nnx.to_flat_state(nnx.state(theirs))}
    assert {id(each) for each in binding.variables} == names
    leaves = [each.get_raw_value() for each in binding.variables]
    graphdef, state = nnx.split(spec.model)
    model = nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), leaves))
    tokens = jnp.asarray([[3, 1, 4, 1, 5, 9]], jnp.int32)
    np.testing.assert_allclose(model(tokens), module(tokens), atol=1e-5)
    positions = jnp.arange(6, dtype=jnp.int32)[None]
    inputs = ForwardInput(
        token_ids=tokens, positions=positions, attention=DenseAttention(positions)
    )
    np.testing.assert_allclose(model.logits(model.hidden_states(inputs)), module(tokens), atol=1e-5)


def test_what_does_not_fit_is_refused_with_both_sides(module, path):
    tree = in_layout("tunix", module, path)
    del tree["layers"]["1"]["mlp"]["up_proj"]
    with pytest.raises(ValueError, match=r"Tunix's layout, lacks layers.1.mlp.up_proj.kernel.*up_"):
        prepared(Holder(tree), path)
    tree = in_layout("tunix", module, path)
    tree["final_norm"]["w"] = np.ones(33, np.float32)
    with pytest.raises(ValueError, match=r"final_norm.w \[33\].*model.norm.weight \[32\].*\[32\]"):
        prepared(Holder(tree), path)
    tree = in_layout("tunix", module, path)
    tree["lm_head"] = {"w": np.ones((32, 250), np.float32)}
    with pytest.raises(ValueError, match="has lm_head.w, for which .* has no parameter"):
        prepared(Holder(tree), path)
    with pytest.raises(ValueError, match="enable_lora is for modules of jaxpage"):
        prepared(Holder(in_layout("tunix", module, path)), path, enable_lora=True)
    drafts = {"model": str(path), "num_speculative_tokens": 4}
    with pytest.raises(ValueError, match="parameters of one module, .* names a draft model too"):
        prepared(module, path, speculative_config=drafts)
    with pytest.raises(ValueError, match="no parameters"):
        Binding(nnx.List([]))


def test_a_module_in_another_dtype_is_converted_in_the_step(path):
    module = make_module(path)
    norm = module.model.norm.weight
    norm.set_value(norm.get_value().astype(jnp.bfloat16))
    _, spec = prepared(module, path)
    assert isinstance(spec.model, TrainerView)


def test_swapped_arrays_are_read_until_they_are_forgotten(path):
    module = make_module(path)
    binding, _ = prepared(module, path)
    binding.refresh()
    name, other = "model.norm.weight", jnp.ones(32, jnp.float32)
    own = module.model.norm.weight.get_value()

    def read():
        binding.refresh()
        (found,) = [each for each in binding.variables if each.get_raw_value().shape == (32,)][-1:]
        return found.get_raw_value()

    assert read() is own
    binding.swap({"model": {"norm": {"weight": other}}})
    assert read() is other
    with pytest.raises(ValueError, match="params have model.norm.wait; the module"):
        binding.swap({"model": {"norm": {"wait": other}}})
    with pytest.raises(ValueError, match=rf"params have {name} as float32\[31\].*float32\[32\]"):
        binding.swap({"model": {"norm": {"weight": other[1:]}}})
    assert read() is other
    binding.swap(module)  # the module's own arrays are read from the module
    assert read() is own
    binding.swap({"model": {"norm": {"weight": other}}})
    binding.forget_swapped()
    assert read() is own


def test_host_arrays_are_copied_at_each_swap_and_not_shared(path):
    module = make_module(path)
    binding, _ = prepared(module, path)
    buffers = {name: np.array(each.get_value()) for name, each in variables(module).items()}

    def read():
        binding.refresh()
        return [np.array(each.get_raw_value()) for each in binding.variables]

    def agree():
        pairs = zip(read(), [buffers[name] for name in binding._names], strict=True)
        return {np.array_equal(one, other) for one, other in pairs}

    binding.swap(buffers)
    assert agree() == {True}
    for buffer in buffers.values():
        buffer += 1
    assert agree() == {False}
    binding.swap(buffers)
    assert agree() == {True}


def test_arrays_on_other_devices_are_copied_one_by_one_and_only_when_they_change(path, monkeypatch):
    module = make_module(path)
    away = jax.local_devices()[1]
    for variable in variables(module).values():
        variable.set_value(jax.device_put(variable.get_value(), away))
    binding, _ = prepared(module, path)
    puts = []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, place: puts.append(x) or put(x, place))
    size = sum(each.get_value().nbytes for each in variables(module).values())
    assert binding.refresh() == size and len(puts) == len(variables(module))
    assert binding.refresh() == 0
    norm = module.model.norm.weight
    norm.set_value(put(np.full(32, 2.0, np.float32), away))
    assert binding.refresh() == 32 * 4
    for variable in binding.variables:
        assert variable.get_raw_value().devices() == {jax.local_devices()[0]}


def test_a_deleted_array_is_one_clear_error(path):
    module = make_module(path)
    binding, _ = prepared(module, path)
    binding.refresh()
    binding.check_usable()
    module.model.norm.weight.get_value().delete()
    for check in (binding.check_usable, binding.refresh):
        with pytest.raises(RuntimeError, match="parameter model.norm.weight .* donated or deleted"):
            check()


def test_an_array_that_cannot_be_read_is_one_clear_error(path):
    module = make_module(path)
    binding, _ = prepared(module, path)
    binding.refresh()
    norm = module.model.norm.weight
    kept = norm.get_value()
    norm.set_value(kept.astype(jnp.bfloat16))
    for check in (binding.check_usable, binding.refresh):
        with pytest.raises(
            RuntimeError, match=r"model.norm.weight .* bfloat16\[32\].*float32\[32\]"
        ):
            check()
    norm.set_value(jax.device_put(kept, jax.local_devices()[1]))
    with pytest.raises(RuntimeError, match=r"model.norm.weight .* is now on .*call update\(\)"):
        binding.check_usable()
    assert binding.refresh() == kept.nbytes
    binding.check_usable()
