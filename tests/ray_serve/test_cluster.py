"""A cluster of this machine's own: two replicas of the demo's model, 64 clients, one replica killed, one drained.

Some of Ray's servers listen on every interface, whatever they are told, so there must be none but the loopback:
tests/README.md has the command.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2 as httpx  # comes with openai
import pytest
import yaml

from jaxpage.demo import checkpoint

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("default")]  # Ray's own warnings

NUM_CLIENTS = 64
ARGS = {
    "model": str(checkpoint()),
    "served_model_name": "demo",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "kv_cache_memory_bytes": "64M",
    "enable_prompt_tokens_details": True,
    "shutdown_timeout": 60.0,
}
PROMPTS = [f"Once upon a time there were {number} little cats. One day" for number in range(8)]


def only_the_loopback_is_there() -> bool:
    routes = Path("/proc/net/route").read_text().splitlines()[1:]
    names = [name for _, name in socket.if_nameindex()]
    up = [n for n in names if Path(f"/sys/class/net/{n}/operstate").read_text() != "down\n"]
    return not routes and up == ["lo"]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Of two replicas."""
    if not only_the_loopback_is_there():
        pytest.fail("Ray would listen on every interface; tests/README.md says how to run this")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # 127.0.0.1 is the node's address
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))
        import ray
        from ray import serve

        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ray.init(
            address="local",
            include_dashboard=False,
            num_cpus=4,
            object_store_memory=100 * 2**20,
            log_to_driver=False,
        )
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            deploy(num_replicas=2)
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def deploy(**options: Any) -> None:
    """What `serve deploy` does with the packaged serve.yaml, of which the arguments and the numbers are ours."""
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    config = yaml.safe_load(files("jaxpage.ray_serve").joinpath("serve.yaml").read_text())
    application, (engine,) = config["applications"][0], config["applications"][0]["deployments"]
    application["args"] = ARGS
    if "num_replicas" in options:
        del engine["autoscaling_config"]
    else:
        options = {"autoscaling_config": engine["autoscaling_config"] | options}
    engine |= options
    client: Any = _get_global_client()
    client.deploy_apps(ServeDeploySchema.model_validate(config))
    time.sleep(1)  # until the controller knows what it is to do
    wait_until(lambda: serve.status().applications["jaxpage"].status == "RUNNING", 200)


def replicas(deployment: str = "Engine") -> list[tuple[str, Any]]:
    """(id, actor) of each."""
    import ray

    named = ray.util.list_named_actors(all_namespaces=True)
    beginning = f"SERVE_REPLICA::jaxpage#{deployment}#"
    names = [actor["name"] for actor in named if actor["name"].startswith(beginning)]
    return [(name.rsplit("#", 1)[1], ray.get_actor(name, namespace="serve")) for name in names]


def sample(url: str, name: str) -> dict[str, float]:
    """The values of a metric by replica."""
    found: dict[str, float] = {}
    for line in httpx.get(f"{url}/metrics", timeout=60).text.splitlines():
        if line.startswith(name + "{"):
            replica = line.split('replica="')[1].split('"')[0]
            found[replica] = found.get(replica, 0.0) + float(line.rsplit(" ", 1)[1])
    return found


def serving(url: str) -> set[str]:
    """The replicas that are there and take requests."""
    return {name for name, _ in replicas()} & set(sample(url, "vllm:num_requests_running"))


def complete(url: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0} | more
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_it_is_the_server_s_own_api(url):
    assert [m["id"] for m in httpx.get(f"{url}/v1/models").json()["data"]] == ["demo"]
    ready = httpx.get(f"{url}/ready", headers={"X-Request-Id": "mine"})
    assert ready.status_code == 200 and ready.headers.get_list("x-request-id") == ["mine"]
    wrong = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "temperature": -1})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "temperature"
    stored = httpx.post(f"{url}/v1/responses", json={"input": "x", "store": True})
    assert stored.status_code == 400 and stored.json()["error"]["param"] == "store"
    assert httpx.get(f"{url}/nothing").status_code == 404
    assert len(sample(url, "vllm:num_requests_running")) == 2
    paused = httpx.post(f"{url}/pause")
    assert paused.json() == {"status": "paused"}
    assert httpx.post(f"{url}/resume").status_code == 200


def test_openai_s_client_streams(url):
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    messages = [{"role": "user", "content": "Hello!"}]
    asked: dict[str, Any] = {"model": "demo", "messages": messages, "temperature": 0}
    whole = client.chat.completions.create(**asked, max_tokens=16)
    chunks = client.chat.completions.create(**asked, max_tokens=16, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content


def test_equal_beginnings_go_to_the_replica_that_knows_them(url):
    stories = [
        f"{number} " + f"The cat number {number} sat on a mat. " * 16 for number in range(16)
    ]
    before = sample(url, "vllm:prompt_tokens_total")
    cached = []
    for end in ("It was red.", "It was blue.", "It was green."):
        for story in stories:
            usage = complete(url, story + end, max_tokens=1)["usage"]
            cached.append(usage["prompt_tokens_details"]["cached_tokens"] / usage["prompt_tokens"])
    assert min(cached[len(stories) :]) > 0.5
    after = sample(url, "vllm:prompt_tokens_total")
    assert all(after[replica] > before[replica] for replica in after)


def test_a_dead_engine_is_replaced_and_the_other_one_answers_meanwhile(url):
    from ray import serve

    before = serving(url)
    handle = serve.get_deployment_handle("Engine", "jaxpage")
    handle.options(method_name="__del__").remote().result(timeout_s=60)  # its engine is shut down
    for number in range(20):
        assert complete(url, f"{number}: once upon a time", max_tokens=1)["choices"]
    wait_until(lambda: len(new := serving(url)) == 2 and len(new & before) == 1)


def test_a_client_that_leaves_aborts_its_request(url):
    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        next(answer.iter_lines())
    wait_until(lambda: sum(sample(url, "vllm:num_requests_running").values()) == 0)


def wait_until(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.2)


@dataclass
class Load:
    """Clients that ask until they are told to end, and what they saw."""

    url: str
    expected: dict[str, str]
    has_ended: threading.Event = field(default_factory=threading.Event)
    num_answered: int = 0
    num_failed: int = 0  # with a status or an event that says "try again"
    wrong: list[str] = field(default_factory=list)

    def client(self, number: int) -> None:
        with httpx.Client(timeout=120) as client:
            while not self.has_ended.is_set():
                prompt = PROMPTS[number % len(PROMPTS)]
                try:
                    is_answered = self.ask(client, prompt, stream=number % 2 == 0)
                except Exception as error:
                    self.wrong.append(repr(error))
                    return
                self.num_answered += is_answered
                self.num_failed += not is_answered

    def ask(self, client: httpx.Client, prompt: str, stream: bool) -> bool:
        """Whether it was answered; else it may be asked again."""
        body = {"prompt": prompt, "max_tokens": 48, "temperature": 0, "stream": stream}
        if not stream:
            answer = client.post(f"{self.url}/v1/completions", json=body)
            if answer.status_code == 503:
                assert answer.headers["retry-after"]
                return False
            assert answer.status_code == 200, answer.text
            assert answer.json()["choices"][0]["text"] == self.expected[prompt]
            return True
        with client.stream("POST", f"{self.url}/v1/completions", json=body) as answer:
            if answer.status_code == 503:
                return False
            assert answer.status_code == 200
            return self.read(prompt, [line[6:] for line in answer.iter_lines() if line])

    def read(self, prompt: str, events: list[str]) -> bool:
        """A stream is one answer, whole, or its beginning and then an error."""
        assert events.count("[DONE]") == 1 and events[-1] == "[DONE]", events
        chunks = [json.loads(event) for event in events[:-1]]
        errors = [chunk["error"] for chunk in chunks if "error" in chunk]
        choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
        text = "".join(choice["text"] for choice in choices)
        if errors:
            assert len(errors) == 1 and errors[0]["code"] == 503 and "error" in chunks[-1]
            assert self.expected[prompt].startswith(text)
            return False
        assert text == self.expected[prompt]
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert sum(choice["finish_reason"] is not None for choice in choices) == 1
        return True


@contextlib.contextmanager
def load(url: str) -> Iterator[Load]:
    """Ends with an error if any client saw what it must not see."""
    expected = {p: complete(url, p, max_tokens=48)["choices"][0]["text"] for p in PROMPTS}
    found = Load(url, expected)
    with ThreadPoolExecutor(NUM_CLIENTS) as threads:
        futures = [threads.submit(found.client, number) for number in range(NUM_CLIENTS)]
        try:
            yield found
        finally:
            found.has_ended.set()
        for future in futures:
            future.result()
    assert found.wrong == []


def more_answers(found: Load, number: int = NUM_CLIENTS) -> None:
    before = found.num_answered
    wait_until(lambda: found.wrong or found.num_answered >= before + number, 120)


def test_under_load_one_replica_is_killed_and_one_is_drained(url):
    import ray

    with load(url) as found:
        more_answers(found)
        assert found.num_failed == 0
        running = sample(url, "vllm:num_requests_running")
        assert len(running) == 2 and min(running.values()) > 0
        killed = min(running)
        ray.kill(dict(replicas())[killed])
        wait_until(lambda: len(new := serving(url)) == 2 and killed not in new)
        more_answers(found)
        num_failed = found.num_failed
        deploy(num_replicas=1)
        wait_until(lambda: len(replicas()) == 1)
        more_answers(found)
    print(f"{found.num_answered} answered, {num_failed} were told to try again")
    assert num_failed <= NUM_CLIENTS
    assert found.num_failed == num_failed  # none of them by draining


def test_more_requests_bring_more_replicas(url):
    assert len(replicas()) == 1
    deploy(max_replicas=2, target_ongoing_requests=8, upscale_delay_s=0)
    with load(url) as found:
        wait_until(lambda: len(serving(url)) == 2)
        more_answers(found)
    assert found.num_failed == 0


def test_a_front_that_dies_is_replaced(url):
    import ray

    body = {"prompt": "Once", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        ((_, actor),) = replicas("Front")
        ray.kill(actor)
        with contextlib.suppress(httpx.RemoteProtocolError):
            assert "data: [DONE]" not in list(lines)
    wait_until(lambda: httpx.get(f"{url}/live", timeout=60).status_code == 200)
    assert complete(url, "Once")["choices"]


def test_the_command_serves_on_the_cluster_until_a_signal(url):
    import ray
    from ray import serve

    serve.delete("jaxpage")
    flags = (
        "--backend ray --max-num-seqs 16 --max-num-batched-tokens 64 --kv-cache-memory-bytes 64M"
    )
    words = ["serve", ARGS["model"], *flags.split()]
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxpage", *words],
        env=os.environ | {"RAY_ADDRESS": ray.get_runtime_context().gcs_address},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("serving "):
                break
        assert complete(url, "Once")["choices"]
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
    assert "jaxpage" not in serve.status().applications
