"""The page in headless Chromium, on a server that computes nothing (`stub`).

Needs Debian's package `chromium` (or a Chromium or Chrome of that name on the PATH), and Playwright, which drives it.
Runs only when asked for, `-m browser`; then it fails without them.
"""

from __future__ import annotations

import re
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import uvicorn

from tests.server.stub import JSON, MARKUP, REASONING, TEXT, Stub

pytestmark = pytest.mark.browser

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
# Without a sandbox, for it cannot have one as root; and without calls of its own to anybody.
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    """The URL of a server in a thread, on a free port of 127.0.0.1."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()  # else a browser that is faster than the server is refused
        config = uvicorn.Config(stub.app, log_level="warning", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert path, f"these tests need one of {', '.join(CHROMIUM)}: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


class Visit:
    """A page in a window of its own, and what went wrong in it."""

    def __init__(self, browser, stub: Stub, url: str, **options):
        self.stub = stub
        self.context = browser.new_context(viewport=WIDE, **options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(20_000)  # milliseconds
        self.complaints: list[str] = []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._on_console)
        self.page.goto(url)
        self.page.locator("#model:enabled").wait_for()

    def _on_console(self, message) -> None:
        # A status that the tests ask for is no fault of the page.
        expected = r"status of (400|401|503)|ERR_INTERNET_DISCONNECTED"
        if message.type in ("error", "warning") and not re.search(expected, message.text):
            self.complaints.append(message.text)

    def ask(self, text: str, *, wait: bool = True) -> None:
        self.page.fill("#prompt", text)
        self.page.press("#prompt", "Enter")
        if wait:
            self.wait()

    def wait(self) -> None:
        """Until no answer is under way."""
        self.page.locator("#stop-button").wait_for(state="hidden")

    def last(self, inner: str = ""):
        """A part of the last message."""
        return self.page.locator(f"#messages > li:last-child {inner}".strip())

    @property
    def sent(self) -> dict:
        """What the server was asked last."""
        return self.stub.requests[-1]


@pytest.fixture(scope="module")
def server():
    stub = Stub()
    with serving(stub) as url:
        yield stub, url


@pytest.fixture
def stub(server):
    """As new for each test."""
    stub = server[0]
    stub.delay = 0.002
    stub.num_disconnects = 0
    stub.requests.clear()
    return stub


@pytest.fixture
def url(server):
    return server[1]


@pytest.fixture
def visit(browser, stub, url):
    visit = Visit(browser, stub, url)
    yield visit
    visit.context.close()
    assert visit.complaints == []


# The conversation.


def test_pictures_are_chosen_dropped_and_sent(visit, tmp_path):
    from PIL import Image

    colours = ("red", "green")
    for colour in colours:
        Image.new("RGB", (40, 30), colour).save(tmp_path / f"{colour}.png")
    (tmp_path / "notes.txt").write_text("no picture")
    files = [tmp_path / f"{colour}.png" for colour in colours]
    visit.page.set_input_files("#files", [*files, tmp_path / "notes.txt"])
    shown = visit.page.locator("#pictures img")
    shown.nth(1).wait_for()
    assert shown.count() == 2
    visit.page.get_by_role("button", name="Remove picture 1").click()
    assert shown.count() == 1
    visit.ask("what is it? text")
    (picture, text) = visit.sent["messages"][-1]["content"]
    assert text == {"type": "text", "text": "what is it? text"}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    seen = visit.page.locator("#messages li.user img")
    assert seen.evaluate("img => [img.naturalWidth, img.naturalHeight]") == [40, 30]
    assert visit.page.locator("#pictures").is_hidden()
    # Another question about the same picture.
    visit.page.get_by_role("button", name="Edit").click()
    visit.page.fill("form.edit textarea", "and what now? text")
    visit.page.get_by_role("button", name="Ask again").click()
    visit.wait()
    assert visit.sent["messages"][-1]["content"][0] == picture


def test_a_picture_is_sent_without_a_word(visit, tmp_path):
    from PIL import Image

    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    assert visit.page.locator("#send").is_disabled()
    visit.page.set_input_files("#files", tmp_path / "one.png")
    visit.page.locator("#send:enabled").click()
    visit.wait()
    (picture,) = visit.sent["messages"][-1]["content"]
    assert picture["type"] == "image_url"


def test_an_answer_is_shown_while_it_comes(visit):
    visit.stub.delay = 0.02
    visit.ask("hello text", wait=False)
    visit.last(".body").filter(has_text="Paged attention").wait_for()
    assert visit.page.locator("#stop-button").is_visible()
    assert "table[position" not in visit.last().inner_text()
    visit.wait()
    assert visit.last(".prose p").count() == 2
    code = visit.last("pre.fence code").inner_text()
    assert code.startswith("def slot(") and "```" not in visit.last(".body").inner_text()
    assert visit.last("pre.fence").get_attribute("data-language") == "python"
    numbers = visit.last(".numbers-line").inner_text()
    assert re.search(
        r"78 tokens · first after .* tokens/s · 96 of 120 prompt tokens cached · complete", numbers
    )
    assert visit.page.evaluate("document.activeElement.id") == "prompt"
    visit.ask("more text")
    assert [m["role"] for m in visit.sent["messages"]] == ["user", "assistant", "user"]
    assert visit.sent["messages"][1]["content"] == TEXT


def test_stop_ends_the_request_and_keeps_what_came(visit):
    visit.stub.delay = 0.05
    visit.ask("hello long", wait=False)
    visit.last(".body").filter(has_text="Paged").wait_for()
    visit.page.click("#stop-button")
    visit.wait()
    assert "stopped by you" in visit.last(".numbers-line").inner_text()
    assert visit.last(".body").inner_text().startswith("Paged")
    assert visit.last(".error").is_hidden()
    assert visit.page.evaluate("document.activeElement.id") == "prompt"
    deadline = time.monotonic() + 5
    while not visit.stub.num_disconnects and time.monotonic() < deadline:
        time.sleep(0.02)
    assert visit.stub.num_disconnects == 1


def test_what_the_model_writes_is_never_html(visit):
    visit.page.click("#logprobs")
    for view in ("tokens", "text"):
        visit.ask("some markup")
        assert visit.last(".body").inner_text() == MARKUP
        assert visit.page.locator("#messages :is(img, script, b)").count() == 0
        if view == "tokens":
            visit.page.click("#logprobs")
    visit.ask('<b>bold</b><img src=x onerror="document.title=1"> markup')
    assert visit.page.locator("#messages :is(img, b)").count() == 0
    assert visit.page.title() == "jaxpage"


def test_fences_are_found_wherever_a_stream_is_cut(visit):
    shown = """async (texts) => {
        const { Prose } = await import("/page/assets/prose.js");
        const read = (text, size) => {
            const prose = new Prose();
            for (let end = size; end < text.length; end += size) prose.update(text.slice(0, end), {isFinal: false});
            prose.update(text, {isFinal: true});
            return [...prose.element.children].map((e) => `${e.tagName} ${e.dataset.language ?? ""}|${e.textContent}`);
        };
        return texts.map((text) => {
            const whole = read(text, text.length).join("/");
            for (let size = 1; size < text.length; size += 1) {
                const cut = read(text, size).join("/");
                if (cut !== whole) throw new Error(`pieces of ${size}: ${cut}, not ${whole}`);
            }
            return whole;
        });
    }"""
    texts = {
        "a\n\n```py\nx = 1\n```\nb": "P |a\n\n/PRE py|x = 1\n/P |b",
        "`a` and ``` b\n```c``` d": "P |`a` and ``` b\n```c``` d",
        "```\nnever closed": "PRE |never closed",
        "```\nclosed\n```": "PRE |closed\n",
        "ends with\n```": "P |ends with\n```",
    }
    assert visit.page.evaluate(shown, list(texts)) == list(texts.values())


def test_reasoning_is_open_while_alone_and_can_be_opened_later(visit):
    visit.stub.delay = 0.02
    visit.ask("please reason", wait=False)
    visit.last(".reasoning[open]").wait_for()
    visit.wait()
    assert visit.last(".reasoning[open]").count() == 0
    assert REASONING not in visit.last().inner_text()
    visit.last("summary").press("Enter")
    assert REASONING in visit.last().inner_text()
    visit.ask("more text")
    assert "reasoning" not in visit.sent["messages"][1]


def test_messages_can_be_edited_regenerated_cleared_and_brought_back(visit):
    page = visit.page
    visit.ask("one text")
    visit.ask("two text")
    assert page.locator("#messages > li").count() == 4
    visit.last("button >> text=Regenerate").click()
    visit.wait()
    assert [m["content"] for m in visit.sent["messages"]] == ["one text", TEXT, "two text"]
    page.locator("#messages > li").first.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Your message")
    field.press("Escape")
    assert page.evaluate("document.activeElement.textContent") == "Edit"
    page.locator("#messages > li").first.get_by_role("button", name="Edit").click()
    field.fill("another json")
    field.press("Control+Enter")
    visit.wait()
    assert [m["content"] for m in visit.sent["messages"]] == ["another json"]
    assert page.locator("#messages > li").count() == 2
    page.click("#clear")
    assert page.locator("#messages > li").count() == 0 and page.locator("#welcome").is_visible()
    page.click("#undo")
    assert page.locator("#messages > li").count() == 2
    assert visit.last("pre.json").is_visible()


def test_a_screen_reader_hears_the_finished_answer_once(visit):
    visit.page.evaluate("""() => {
        window.heard = [];
        new MutationObserver(() => {
            const text = document.getElementById("announcer").textContent;
            if (text) window.heard.push(text);
        }).observe(document.getElementById("announcer"), {childList: true, characterData: true, subtree: true});
    }""")
    visit.ask("hello text")
    visit.page.locator("#announcer:not(:empty)").wait_for(state="attached")
    assert visit.page.evaluate("window.heard") == [f"Answer: {TEXT}"]
    live = "[aria-live]:not([aria-live=off]), [role=log], [role=status]"
    assert visit.page.locator(live).count() == 1


# Token probabilities.


def test_tokens_show_alternatives_on_hover_and_by_keyboard(visit):
    page = visit.page
    page.click("#logprobs")
    page.fill("#top-logprobs", "3")
    visit.ask("hello text")
    assert visit.sent["logprobs"] is True and visit.sent["top_logprobs"] == 3
    tokens = visit.last(".token")
    assert tokens.count() == 78 and "".join(tokens.all_inner_texts()) == TEXT
    tip = page.get_by_role("tooltip")
    tokens.nth(4).hover()
    assert tip.is_visible() and tip.locator("tbody tr").count() == 3
    page.mouse.move(640, 20)
    assert tip.is_hidden()
    assert visit.last(".token[tabindex='0']").count() == 1
    tokens.first.focus()
    page.keyboard.press("ArrowRight")
    assert tokens.nth(1).evaluate("e => e === document.activeElement && e.ariaSelected") == "true"
    assert re.search(r"%\s+logprob -\d+\.\d+", tip.inner_text())
    assert tokens.nth(1).get_attribute("aria-describedby") == "tip"
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.index") > "1"
    page.keyboard.press("Escape")
    assert tip.is_hidden()
    page.keyboard.press("End")
    assert tokens.nth(77).evaluate("e => e === document.activeElement")
    visit.last("button >> text=Text").click()
    assert visit.last("pre.fence").is_visible() and tokens.count() == 0


def test_unlikely_tokens_look_different(visit):
    visit.page.click("#logprobs")
    visit.ask("hello text")
    styles = {}
    for level in range(5):
        token = visit.last(f".level-{level}").first
        styles[level] = token.evaluate(
            "e => getComputedStyle(e).backgroundColor + getComputedStyle(e).boxShadow"
        )
    assert len(set(styles.values())) >= 4


# Structured output and tools.


def test_json_that_fits_a_schema_is_asked_for_and_shown(visit):
    page = visit.page
    page.select_option("#format", "json_schema")
    page.fill("#constraint", "{broken")
    page.fill("#prompt", "some json")
    page.click("#send")
    assert visit.stub.requests == []
    assert page.evaluate("document.activeElement.id") == "constraint"
    page.click("#constraint-example")
    visit.ask("some json")
    asked = visit.sent["response_format"]
    assert asked["type"] == "json_schema"
    assert asked["json_schema"]["schema"]["required"] == ["name", "age", "tags"]
    shown = visit.last("pre.json")
    assert '\n  "id": 12345678901234567890,' in shown.inner_text()
    assert shown.locator(".name").count() == 5
    visit.last("button >> text=Text").click()
    assert visit.last(".prose").inner_text() == JSON


def test_other_constraints_become_fields_of_the_request(visit):
    page = visit.page
    page.select_option("#format", "regex")
    page.fill("#constraint", r"\d+ (a|b)")
    visit.ask("hello text")
    assert visit.sent["structured_outputs"] == {"regex": r"\d+ (a|b)"}
    page.select_option("#format", "choice")
    assert page.input_value("#constraint") == ""
    page.fill("#constraint", "yes\nno\n")
    visit.ask("hello text")
    assert visit.sent["structured_outputs"] == {"choice": ["yes", "no"]}
    page.select_option("#format", "json_object")
    visit.ask("hello text")
    assert visit.sent["response_format"] == {"type": "json_object"}
    page.select_option("#format", "regex")
    assert page.input_value("#constraint") == r"\d+ (a|b)"
    page.select_option("#format", "text")
    visit.ask("hello text")
    assert not {"structured_outputs", "response_format"} & visit.sent.keys()


def test_calls_of_tools_are_shown_and_answered(visit):
    page = visit.page
    page.fill("#tools", '[{"type": "function"}]')
    page.fill("#prompt", "now tool")
    page.click("#send")
    assert visit.stub.requests == []
    page.click("#tools-example")
    page.select_option("#tool-choice", "function get_weather")
    visit.ask("now tool")
    assert visit.sent["tools"][0]["function"]["name"] == "get_weather"
    assert visit.sent["tool_choice"] == {"type": "function", "function": {"name": "get_weather"}}
    calls = visit.last(".call")
    assert calls.count() == 2
    assert (
        "get_weather" in calls.first.inner_text() and '"city": "Paris"' in calls.first.inner_text()
    )
    page.get_by_role("button", name="Send results").click()  # the results are required
    assert len(visit.stub.requests) == 1
    calls.first.get_by_label("Result").fill('{"sun": true}')
    calls.nth(1).get_by_label("Result").fill("rain")
    page.get_by_role("button", name="Send results").click()
    visit.wait()
    assert visit.last(".body").inner_text() == 'The tools say: {"sun": true}; rain'
    _, call, first, second = visit.sent["messages"]
    assert [c["id"] for c in call["tool_calls"]] == ["call_0", "call_1"]
    assert (first["role"], first["tool_call_id"], first["content"]) == (
        "tool",
        "call_0",
        '{"sun": true}',
    )
    assert second["content"] == "rain"
    assert page.get_by_role("button", name="Send results").count() == 0


def test_settings_are_sent_only_where_they_are_set(visit):
    page = visit.page
    visit.ask("hello text")
    assert visit.sent.keys() == {"model", "messages", "stream", "stream_options"}
    assert visit.sent["model"] == "stub-0.5b"
    page.fill("#system", "Be brief.")
    values = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "max_completion_tokens": 64,
        "seed": 7,
    }
    penalties = {"presence_penalty": -0.5, "frequency_penalty": 1, "repetition_penalty": 1.1}
    page.get_by_text("Penalties").click()
    for name, value in (values | penalties).items():
        page.fill(f"[name={name}]", str(value))
    page.fill("#stop", "END\n\\n\\n\n")
    visit.ask("hello text")
    expected = values | penalties | {"stop": ["END", "\n\n"]}
    assert {name: visit.sent[name] for name in expected} == expected
    assert visit.sent["messages"][0] == {"role": "system", "content": "Be brief."}
    page.fill("[name=top_p]", "1.5")
    page.fill("#prompt", "hello text")
    page.click("#send")
    assert len(visit.stub.requests) == 2
    page.get_by_role("button", name="Reset").click()
    visit.ask("hello text")
    assert visit.sent.keys() == {"model", "messages", "stream", "stream_options"}


# What goes wrong.


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("refuse", "temperature must be in [0, 2], got 9.0 (field temperature)"),
        ("busy", "Try again in 7 s."),
        ("error", "the step that computed this request failed"),
        ("break", "The answer broke off"),
    ],
)
def test_errors_of_the_server_are_shown_with_their_message(visit, word, message):
    visit.ask(f"please {word}")
    error = visit.last(".error")
    assert message in error.inner_text() and error.get_attribute("role") == "alert"
    if word in ("error", "break"):
        assert visit.last(".body").inner_text().startswith("Paged attention")
    visit.last("button >> text=Try again").click()
    visit.wait()
    assert len(visit.stub.requests) == 2
    visit.ask("hello text")
    contents = [m["content"] for m in visit.sent["messages"]]
    assert (contents[0] == "hello text") == (word in ("refuse", "busy"))


def test_a_lost_network_is_told_and_forgotten_when_it_is_back(visit):
    page = visit.page
    page.locator("#engine-body").wait_for()
    visit.context.set_offline(True)
    visit.ask("hello text")
    assert "The server cannot be reached." in visit.last(".error").inner_text()
    page.locator("#engine-state").filter(has_text="cannot be reached").wait_for()
    visit.context.set_offline(False)
    visit.last("button >> text=Try again").click()
    visit.wait()
    assert visit.last(".error").is_hidden()
    page.locator("#engine-state").filter(has_text="at work").wait_for()


def test_a_key_is_asked_for_sent_and_kept_only_if_wanted(browser):
    stub = Stub(delay=0.002, key="secret")
    with serving(stub) as url:
        context = browser.new_context(viewport=WIDE)
        page = context.new_page()

        def log_in(key, *, keep=False):
            page.locator("#key-dialog[open]").wait_for()
            page.fill("#key", key)
            page.set_checked("#key-keep", keep)
            page.press("#key", "Enter")

        page.goto(url)
        log_in("wrong")
        page.get_by_text("The server did not accept that key.").wait_for()
        log_in("secret")
        page.locator("#model:enabled").wait_for()
        page.locator("#engine-body").wait_for()
        page.fill("#prompt", "hello text")
        page.press("#prompt", "Enter")
        page.get_by_text("complete").wait_for()
        assert (
            page.evaluate(
                "JSON.stringify([{...sessionStorage}, {...localStorage}, document.cookie])"
            )
            == '[{},{},""]'
        )
        page.reload()
        log_in("secret", keep=True)
        page.locator("#model:enabled").wait_for()
        page.reload()
        page.locator("#model:enabled").wait_for()
        assert page.locator("#key-dialog[open]").count() == 0
        page.evaluate("sessionStorage.clear()")
        page.reload()
        page.locator("#key-dialog[open]").wait_for()
        page.keyboard.press("Escape")
        page.wait_for_timeout(300)
        assert page.locator("#key-dialog[open]").count() == 0
        assert page.get_by_role("button", name="API key").is_visible()
        context.close()


# The engine.


def test_the_engine_view_follows_the_engine(visit):
    page = visit.page
    page.locator("#requests tr").first.wait_for()
    running = visit.stub.llm.stats().num_running
    before = visit.stub.llm.num_looks
    page.wait_for_timeout(2500)
    assert page.locator("#numbers").inner_text().count("tokens/s") == 2
    assert page.locator("#requests tr").count() >= running > 0
    counts = [int(text) for text in page.locator("#kinds dd").all_inner_texts()]
    assert sum(counts) == 511
    colours = page.evaluate("""() => {
        const canvas = document.getElementById("pool");
        const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const found = new Set();
        for (let i = 0; i < data.length; i += 4) found.add(data.slice(i, i + 4).join());
        return found.size;
    }""")
    assert colours > 6
    assert 1 <= visit.stub.llm.num_looks - before <= 4
    page.get_by_role("button", name="Hold view").click()
    # It looks every second; the last look may take a while on a busy machine.
    looks = [visit.stub.llm.num_looks]
    while len(looks) < 10 and looks[-1:] != looks[-2:-1]:
        page.wait_for_timeout(1500)
        looks.append(visit.stub.llm.num_looks)
    assert looks[-1] == looks[-2]
    page.locator("#requests tr").first.focus()
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.sectionRowIndex") == 1


# Looks.


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_the_page_fits_and_is_accessible(browser, stub, url, scheme, size):
    from axe_playwright_python.sync_playwright import Axe

    is_narrow = size is NARROW
    visit = Visit(browser, stub, url, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    page = visit.page
    page.set_viewport_size(size)

    def show(view: str) -> None:
        if is_narrow:
            page.get_by_role("navigation").get_by_role("button", name=view).click()
        assert page.locator(f"#{view.lower()}").is_visible()

    def check() -> None:
        found = Axe().run(page).response["violations"]
        assert [(v["id"], [n["target"] for n in v["nodes"]]) for v in found] == []
        assert page.evaluate("document.documentElement.scrollWidth") == size["width"]

    check()
    show("Settings")
    page.check("#logprobs")
    page.click("#tools-example")
    page.select_option("#format", "json_schema")
    page.click("#constraint-example")
    page.get_by_text("Penalties").click()
    check()
    show("Chat")
    visit.ask("some text")
    visit.last(".token").nth(4).focus()
    check()
    show("Settings")
    page.uncheck("#logprobs")
    show("Chat")
    for word in ("reason", "json", "tool", "error", "refuse"):
        visit.ask(f"some {word}")
    page.locator(".reasoning summary:visible").click()
    check()
    show("Engine")
    page.locator("#programs tr.used").first.wait_for()
    check()
    if is_narrow:  # as on a wide screen at 400 %
        page.set_viewport_size({"width": 320, "height": 600})
        for view in ("Engine", "Settings", "Chat"):
            show(view)
            assert page.evaluate("document.documentElement.scrollWidth") == 320
    visit.context.close()
    assert visit.complaints == []


def test_every_control_shows_that_it_has_the_focus(visit):
    page = visit.page
    page.fill("#prompt", "text")
    page.focus("#model")
    seen = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        name, outline = page.evaluate("""() => {
            const element = document.activeElement;
            const style = getComputedStyle(element);
            return [element.id || element.name || element.textContent, `${style.outlineStyle} ${style.outlineWidth}`];
        }""")
        seen.add(name)
        assert (
            page.evaluate("document.activeElement === document.body") or outline == "solid 2px"
        ), name
    assert {"system", "temperature", "format", "tools", "prompt", "send"} <= seen
