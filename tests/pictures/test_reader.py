"""Pictures in prompts and messages: vLLM's and OpenAI's forms, what templates get, limits, and what is refused."""

from __future__ import annotations

import base64
import io
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from jaxpage.checkpoint_config import load_hf_config
from jaxpage.config import EngineConfig
from jaxpage.demo import checkpoint
from jaxpage.input_processor import InputProcessor
from jaxpage.pictures.border import Expanded
from jaxpage.pictures.prompt import PromptPictures
from jaxpage.tokenizer import load_tokenizer
from tests.fake_vision import PLACEHOLDER, TEMPLATE, VIDEO_PLACEHOLDER, FakeProcessor, pixels


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(checkpoint()))


@pytest.fixture
def inputs(tokenizer):
    return make_inputs(tokenizer)


def make_inputs(tokenizer, *, most_patches: int = 256, **options) -> InputProcessor:
    """An input processor of an engine that is not there."""
    folder = str(checkpoint())
    config = EngineConfig(model=folder, max_model_len=128, **options)
    built = SimpleNamespace(
        config=config.resolve(load_hf_config(folder), platform="cpu"),
        tokenizer=tokenizer,
        vocab_size=1903,
        eos_token_ids=(2,),
        default_sampling={},
        has_recurrent_state=False,
        picture_processor=FakeProcessor(),
        adapters=None,
        research=None,
        most_patches=most_patches,
    )
    return InputProcessor(built, ids_in_use=())


def data_url(array: np.ndarray, kind: str = "PNG") -> str:
    file = io.BytesIO()
    Image.fromarray(array).save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def hashes(prompt) -> list[bytes]:
    return [picture.content_hash for picture in prompt.pictures.pictures]


def test_placeholders_of_a_prompt_are_expanded(inputs):
    text = "a <|endoftext|> b <|endoftext|>"
    images = [Image.fromarray(pixels(1)), pixels(2, 2, 4)]
    (prompt,) = inputs.parse({"prompt": text, "multi_modal_data": {"image": images}})
    ids = prompt.token_ids
    assert prompt.pictures.spans == ((ids.index(0), 6), (len(ids) - 2, 2))
    assert prompt.token_ids.count(PLACEHOLDER) == 8
    (request,) = inputs.requests([prompt])
    assert request.pictures is prompt.pictures and request.prompt_token_ids == ids


def test_one_picture_needs_no_list_and_token_ids_do_as_well(inputs):
    ids = [5, PLACEHOLDER, 6]
    one, many = (
        inputs.parse({"prompt_token_ids": ids, "multi_modal_data": {"image": image}})[0]
        for image in (pixels(1), [pixels(1)])
    )
    assert one.token_ids == many.token_ids == [5, *[PLACEHOLDER] * 6, 6]
    assert hashes(one) == hashes(many)
    expanded = {"prompt_token_ids": one.token_ids, "multi_modal_data": {"image": pixels(1)}}
    assert inputs.parse(expanded)[0].token_ids == one.token_ids


@pytest.mark.parametrize(
    "video",
    [
        np.stack([pixels(1), pixels(2)]),
        [pixels(1), pixels(2)],
        [Image.fromarray(pixels(1)), Image.fromarray(pixels(2))],
        (np.stack([pixels(1), pixels(2)]), {"fps": 4.0}),
        [[pixels(1), pixels(2)]],
        [(np.stack([pixels(1), pixels(2)]), {"fps": 4.0})],
    ],
)
def test_videos_are_arrays_or_frames(inputs, video):
    given = {"prompt_token_ids": [7, VIDEO_PLACEHOLDER], "multi_modal_data": {"video": video}}
    (prompt,) = inputs.parse(given)
    (picture,) = prompt.pictures.pictures
    assert (picture.kind, picture.grid) == ("video", (1, 8, 6))
    assert picture.second_per_grid in (0.25, 0.5)


@pytest.mark.parametrize("fps", [4, np.float32(4), np.int64(4), Fraction(4)])
def test_fps_is_any_real_number(inputs, fps):
    video = ([pixels(1)], {"fps": fps})
    given = {"prompt_token_ids": [VIDEO_PLACEHOLDER], "multi_modal_data": {"video": video}}
    (prompt,) = inputs.parse(given)
    assert [picture.second_per_grid for picture in prompt.pictures.pictures] == [0.25]


def test_arrays_have_the_limits_of_files(inputs):
    huge = np.broadcast_to(np.uint8(0), (20_000, 20_000, 3))  # no memory of its own
    given = {"prompt_token_ids": [PLACEHOLDER], "multi_modal_data": {"image": huge}}
    with pytest.raises(ValueError, match="image 0: the picture has 20000x20000 pixels, more than"):
        inputs.parse(given)


def test_every_form_of_a_picture_in_a_message_is_the_same_picture(inputs, tmp_path, tokenizer):
    Image.fromarray(pixels(1)).save(tmp_path / "a.png")
    inputs = make_inputs(tokenizer, allowed_local_media_path=tmp_path)
    url = data_url(pixels(1))
    parts = [
        {"type": "image_url", "image_url": {"url": url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
        {"type": "image_url", "image_url": {"url": f"file://{tmp_path}/a.png"}},
        {"type": "image_pil", "image_pil": Image.fromarray(pixels(1))},
        {"type": "image", "image": pixels(1)},
        {"type": "image", "image": url},
    ]
    content = [{"type": "text", "text": "Look: "}, *parts, "and say"]
    (prompt,) = inputs.parse_chat([{"role": "user", "content": content}], chat_template=TEMPLATE)
    assert len(set(hashes(prompt))) == 1 and len(hashes(prompt)) == len(parts)
    assert prompt.text.count("<|endoftext|>") == len(parts)
    assert "Look: <|endoftext|>" in prompt.text and "<|endoftext|>and say" in prompt.text
    assert prompt.token_ids.count(PLACEHOLDER) == 6 * len(parts)


def test_conversations_keep_their_own_pictures(inputs):
    def turn(number):
        part = {"type": "image_pil", "image_pil": pixels(number)}
        return [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]

    text = [{"role": "user", "content": "no picture"}]
    prompts = inputs.parse_chat([turn(1), text, turn(2)], chat_template=TEMPLATE)
    assert prompts[1].pictures is None
    expected = [FakeProcessor().image(pixels(n)).content_hash for n in (1, 2)]
    assert [hashes(prompts[0]), hashes(prompts[2])] == [[expected[0]], [expected[1]]]


def test_messages_that_were_loaded_are_not_read_again(inputs):
    url = data_url(pixels(1))
    part = {"type": "image_url", "image_url": {"url": url}}
    messages = [{"role": "user", "content": [part]}]
    loaded = inputs.pictures.load(messages)
    assert messages[0]["content"] == [part]
    assert loaded[0]["content"] == [{"type": "image"}]
    first, second = (
        inputs.parse_chat(given, chat_template=TEMPLATE)[0] for given in (messages, loaded)
    )
    assert first.token_ids == second.token_ids and hashes(first) == hashes(second)


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"type": "image_url"}, r'messages\[1\].content\[0\]: .*must have "image_url"'),
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, r"messages\[1\].content\[0\]: "),
        ({"type": "image_url", "image_url": {"url": "http://a/b"}}, "allowed_media_domains"),
        ({"type": "image_url", "image_url": {"url": "file:///a"}}, "allowed_local_media_path"),
        ({"type": "image_url", "image_url": {}}, "must be a str"),
        ({"type": "image_url", "image_url": {"url": "data:;base64,AAAA"}}, "no picture"),
        ({"type": "image_pil", "image_pil": [1]}, "image of PIL or an array, got list"),
        ({"type": "image", "image": np.zeros((2, 2))}, "uint8"),
        ({"type": "image", "image": pixels(1, 1, 3)}, "no multiple of four"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video_url is not supported"),
        ({"type": "video", "video": "x"}, r"array \[frames"),
        *(
            ({"type": "video", "video": [pixels(1)], "fps": fps}, "fps must be a number .*1e-06")
            for fps in (0, -1.0, 9e-7, 1e7, float("nan"), float("inf"), True, "2")
        ),
        ({"type": "sound"}, "only text"),
    ],
)
def test_bad_parts_are_refused_with_where_they_are(inputs, part, message):
    messages = [{"role": "system", "content": "x"}, {"role": "user", "content": [part]}]
    with pytest.raises(ValueError, match=message):
        inputs.parse_chat(messages, chat_template=TEMPLATE)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt_token_ids": [5], "multi_modal_data": {"image": pixels(1)}}, "0 placeholders"),
        ({"prompt_token_ids": [0, 0], "multi_modal_data": {"image": pixels(1)}}, "2 placeholders"),
        ({"prompt_token_ids": [0], "multi_modal_data": {"audio": pixels(1)}}, "'audio'"),
        ({"prompt_token_ids": [0], "multi_modal_data": [pixels(1)]}, "must be a dict"),
        ({"prompt_embeds": np.zeros((1, 1)), "multi_modal_data": {"image": 1}}, "stand alone"),
        ({"multi_modal_data": {"image": pixels(1)}}, "a prompt needs"),
    ],
)
def test_bad_prompts_are_refused(inputs, prompt, message):
    with pytest.raises(ValueError, match=message):
        inputs.parse(prompt)


def test_numbers_and_sizes_are_limited(tokenizer):
    def parse(inputs, *images):
        ids = [PLACEHOLDER] * len(images)
        return inputs.parse({"prompt_token_ids": ids, "multi_modal_data": {"image": list(images)}})

    few = make_inputs(tokenizer, limit_mm_per_prompt={"image": 1, "video": {"count": 0}})
    parse(few, pixels(1))
    with pytest.raises(ValueError, match="image 1: .*may have 1 of kind 'image'.*limit_mm"):
        parse(few, pixels(1), pixels(2))
    with pytest.raises(ValueError, match="may have 0 of kind 'video'"):
        few.parse(
            {"prompt_token_ids": [VIDEO_PLACEHOLDER], "multi_modal_data": {"video": [pixels(1)]}}
        )
    with pytest.raises(ValueError, match="32 patches, the largest encoder takes 24.*max_pixels"):
        parse(make_inputs(tokenizer, most_patches=24), pixels(1, 4, 8))
    with pytest.raises(ValueError, match="pictures take 128 tokens, max_model_len is 128"):
        parse(make_inputs(tokenizer), *[pixels(i, 16, 16) for i in range(3)])


def test_models_without_pictures_refuse_them(tokenizer):
    inputs = make_inputs(tokenizer)
    inputs.pictures = None
    with pytest.raises(ValueError, match="takes text only"):
        inputs.parse({"prompt": "<|endoftext|>", "multi_modal_data": {"image": pixels(1)}})
    part = {"type": "image_pil", "image_pil": pixels(1)}
    with pytest.raises(ValueError, match="only text"):
        inputs.parse_chat([{"role": "user", "content": [part]}], chat_template=TEMPLATE)


def test_templates_without_parts_and_cut_prompts_are_refused(inputs):
    part = {"type": "image_pil", "image_pil": pixels(1)}
    with pytest.raises(ValueError, match="expects text alone"):
        inputs.parse_chat([{"role": "user", "content": [part]}])
    given = {"prompt_token_ids": [0], "multi_modal_data": {"image": pixels(1)}}
    with pytest.raises(ValueError, match="would cut a prompt with pictures"):
        inputs.parse(given, {"truncate_prompt_tokens": 3})


def test_positions_go_up_only_where_they_are_not_regular():
    """Text, a picture of 2 x 2 embeddings, text: after the picture, positions are two less than the index."""
    axes = [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    expanded = Expanded(
        token_ids=[7, 0, 0, 0, 0, 8, 9],
        spans=((1, 4),),
        positions=np.array(axes, np.int32),
        next_position=5,
    )
    placed = PromptPictures.of(expanded, [FakeProcessor().image(pixels(1, 4, 4))])
    assert placed.position_offset == -2
    assert placed.positions.tolist() == [row[:5] for row in axes]
    assert list(placed.within(5, 7)) == [] and len(list(placed.within(4, 7))) == 1


def test_spans_that_are_not_the_pictures_are_refused():
    expanded = Expanded(token_ids=[0] * 3, spans=((0, 3),), positions=None, next_position=3)
    with pytest.raises(ValueError, match="not those of pictures"):
        PromptPictures.of(expanded, [FakeProcessor().image(pixels(1))])


@pytest.mark.parametrize(
    "options",
    [
        {"limit_mm_per_prompt": {"image": -1}},
        {"limit_mm_per_prompt": {"smell": 1}},
        {"limit_mm_per_prompt": 3},
        {"mm_processor_kwargs": "x"},
        {"mm_encoder_cache_bytes": "many"},
        {"allowed_media_domains": [3]},
    ],
)
def test_bad_options_are_refused_by_name(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        EngineConfig.from_options(model="m", **options)
