"""Flags, exit codes and what goes to which stream. The engine itself is a stub."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest

import jaxpage
from jaxpage import cli, demo, vllm_flags
from jaxpage.aot.plan import Plan
from jaxpage.bench import scheduler
from jaxpage.config import EngineConfig
from jaxpage.outputs import CompletionOutput, Logprob, RequestOutput, RequestStateStats
from jaxpage.reasoning import ReasoningConfig
from jaxpage.sampling_params import SamplingParams


@pytest.fixture
def calls(monkeypatch):
    """What `generate` asked of the LLM, which repeats a letter."""
    made = []

    class StubLLM:
        def __init__(self, **options):
            made.append(SimpleNamespace(options=options))
            if options["model"] == "broken":
                raise ValueError("two\nlines")

        def get_default_sampling_params(self):
            return SamplingParams(temperature=0.5, max_tokens=9)

        def generate(self, prompts, params, **_):
            made[-1].prompts, made[-1].params = prompts, params
            return [
                RequestOutput(
                    request_id="0",
                    prompt=prompt,
                    prompt_token_ids=[1],
                    prompt_logprobs=None,
                    finished=True,
                    metrics=RequestStateStats(),
                    outputs=[
                        CompletionOutput(
                            index=i,
                            text="x" * i,
                            token_ids=[],
                            cumulative_logprob=None,
                            logprobs=None,
                        )
                        for i in range(params.n)
                    ],
                )
                for prompt in prompts
            ]

    monkeypatch.setattr("jaxpage.llm.LLM", StubLLM)
    return made


def test_flags_become_options(calls, capsys):
    code = cli.main(
        "generate --model m --prompt one --prompt two --max-model-len 8k --block-size 32 "
        "--no-enable-prefix-caching --n 2 --temperature 0.7 --stop a b --ignore-eos".split()
        + ["--hf-overrides", json.dumps({"a": {"b": [1]}})]
    )
    assert code == 0
    (call,) = calls
    assert call.options == {
        "model": "m",
        "max_model_len": "8k",
        "block_size": 32,
        "enable_prefix_caching": False,
        "hf_overrides": {"a": {"b": [1]}},
    }
    assert call.prompts == ["one", "two"]
    assert call.params == SamplingParams(
        n=2, temperature=0.7, max_tokens=9, stop=["a", "b"], ignore_eos=True
    )
    assert capsys.readouterr().out == "one\nonex\ntwo\ntwox\n"


def test_what_is_not_given_comes_from_the_model(calls):
    assert cli.main(["generate", "--model", "m", "--prompt", "x"]) == 0
    assert calls[0].options == {"model": "m"}
    assert calls[0].params == SamplingParams(temperature=0.5, max_tokens=9)


def test_without_a_model_it_is_the_one_of_the_demo(calls, capsys):
    assert cli.main(["generate", "--prompt", "x"]) == 0
    assert calls[0].options == {"model": str(demo.checkpoint())}
    assert "the tiny one of the demo" in capsys.readouterr().err


def test_chat_flags_become_options(calls, monkeypatch):
    seen = []

    def converse(llm, console, params, *, system):
        seen.append((params, system))

    monkeypatch.setattr("jaxpage.chat.converse", converse)
    assert cli.main(["chat", "--model", "m", "--decode-steps", "8", "--system", "Be brief."]) == 0
    assert calls[0].options == {"model": "m", "max_num_seqs": 1, "max_num_batched_tokens": 512}
    assert cli.main(["chat", "--temperature", "0", "--max-tokens", "5"]) == 0
    assert calls[1].options["model"] == str(demo.checkpoint())
    assert calls[1].options["decode_steps"] == 1
    assert seen == [
        (SamplingParams(temperature=0.5, max_tokens=None), "Be brief."),
        (SamplingParams(temperature=0, max_tokens=5), None),
    ]


def test_the_demo_has_two_models_and_no_other_flags(monkeypatch):
    performed = []
    monkeypatch.setattr("jaxpage.demo.show.show", lambda: performed.append("text"))
    monkeypatch.setattr("jaxpage.demo.pictures.show.show", lambda: performed.append("pictures"))
    assert cli.main(["demo"]) == 0 and performed == ["text"]
    assert cli.main(["demo", "--pictures"]) == 0 and performed == ["text", "pictures"]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["demo", "--model", "x"])
    assert exit_.value.code == 2


@pytest.mark.parametrize(
    "args",
    [
        ["generate", "--model", "broken", "--prompt", "x"],
        ["generate", "--model", "m"],
        ["generate", "--model", "m", "--n", "0", "--prompt", "x"],
        ["chat", "--model", "broken"],
    ],
)
def test_errors_of_the_user_are_one_line(calls, capsys, args):
    assert cli.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("jaxpage: ") and captured.err.count("\n") == 1


@pytest.mark.parametrize("command", [["chat"], ["complete", "--prompt", "x"]])
def test_a_url_is_checked_before_anything_is_asked(command, capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = f"http://127.0.0.1:{server.getsockname()[1]}"
    for url in ("127.0.0.1:8000", "ftp://127.0.0.1", "http://127.0.0.1:99999", "http://", ""):
        assert cli.main([*command, "--url", url]) == 2
        assert "is not the URL of a server; write it like http" in capsys.readouterr().err
    assert cli.main([*command, "--url", closed]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err == f"jaxpage: {closed} does not answer: nothing listens on this port\n"


@pytest.mark.parametrize("args", [["--block-size", "0"], ["--no-such-flag"], ["--n", "x"]])
def test_flags_that_cannot_be_read_end_with_2(calls, args):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", "--prompt", "x", *args])
    assert exit_.value.code == 2
    assert calls == []


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ([], "usage"),
        (["sreve"], "jaxpage: there is no command 'sreve'"),
        (["--frobnicate"], "jaxpage: there is no command '--frobnicate'"),
        (["bench"], "jaxpage: there is no bench without a name"),
        (["bench", "nothing"], "jaxpage: there is no bench 'nothing'"),
    ],
)
def test_unknown_commands_are_named_and_show_the_usage(args, named, capsys):
    assert cli.main(args) == 2
    error = capsys.readouterr().err
    assert error.startswith(named) and "usage: jaxpage" in error


def test_the_version_is_told(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxpage {jaxpage.__version__}\n"


@pytest.mark.parametrize(
    "name",
    [
        *("generate", "chat", "run-batch", "plan", "compile", "doctor"),
        "serve",
        *("bench step", "bench serve", "bench latency", "bench startup"),
    ],
)
def test_help_is_for_users(name, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*name.split(), "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    for internal in ("Raises", "ValueError", "Returns", "{None}", "flags.", "options_without"):
        assert internal not in text
    assert f"usage: jaxpage {name}" in text


def test_help_of_generate_begins_with_what_most_want(capsys):
    with pytest.raises(SystemExit):
        cli.main(["generate", "--help"])
    text = capsys.readouterr().out
    places = [
        text.index(words)
        for words in (
            *("--prompt ", "--model ", "sampling options", "--max-tokens ", "--temperature "),
            *("--min-tokens ", "engine options", "--dtype ", "--max-model-len ", "--revision "),
        )
    ]
    assert places == sorted(places)
    assert "--max-tokens INT" in text and "--temperature FLOAT" in text


def test_params_are_checked_before_a_model_is_loaded(calls, capsys):
    for command in (["generate", "--prompt", "x"], ["chat"]):
        assert cli.main([*command, "--model", "m", "--temperature", "5"]) == 2
        assert "temperature must be in [0, 2], got 5.0" in capsys.readouterr().err
    # What is not given comes from the model, so it cannot be checked yet.
    assert cli.main(["generate", "--model", "m", "--prompt", "x", "--min-tokens", "9"]) == 0
    assert len(calls) == 1


def test_biases_allowed_ids_and_logprobs(calls, capsys, monkeypatch):
    args = ["generate", "--model", "m", "--prompt", "one", "--logprobs", "1"]
    args += ["--logit-bias", '{"5": -2.5, "6": -Infinity}', "--allowed-token-ids", "5", "6"]
    assert cli.main(args) == 0
    params = calls[0].params
    assert params.logit_bias == {5: -2.5, 6: -math.inf}
    assert (params.allowed_token_ids, params.logprobs) == ([5, 6], 1)
    entries = {7: Logprob(-0.5, 2, " a"), 8: Logprob(-0.25, 1, "b")}
    assert cli._logprobs_line(7, entries).split() == ["7", "'", "a'", "-0.500", "'b'", "-0.250"]


@pytest.mark.parametrize("there", [True, False])
def test_looking_whether_a_file_can_be_written_changes_nothing(tmp_path, monkeypatch, there):
    def stub(bench: scheduler.SchedulerBench) -> None:
        seen.append([(each.name, each.read_text()) for each in tmp_path.iterdir()])

    seen = []
    monkeypatch.setattr(scheduler, "main", stub)
    if there:
        (tmp_path / "x.json").write_text("{}")
    assert cli.main(["bench", "scheduler", "--json", str(tmp_path / "x.json")]) == 0
    assert seen == [[("x.json", "{}")] * there]


def test_bench_commands_get_their_flags(monkeypatch):
    seen = []

    def stub(bench: scheduler.SchedulerBench) -> None:
        seen.append(bench)

    monkeypatch.setattr(scheduler, "main", stub)
    assert cli.main("bench scheduler --rows 4 8 --steps 3".split()) == 0
    assert (seen[0].rows, seen[0].steps) == ((4, 8), 3)


def test_the_module_runs_and_help_needs_no_jax():
    code = "import sys, jaxpage.cli as c; c.main(['--help']); print('jax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "generate" in out.stdout and out.stdout.endswith("False\n")
    out = subprocess.run([sys.executable, "-m", "jaxpage"], capture_output=True, text=True)
    assert (out.returncode, out.stdout) == (2, "") and "usage" in out.stderr


def test_flags_of_vllm_that_ask_for_nothing_are_accepted(calls, monkeypatch):
    usual = (
        "--trust-remote-code --tokenizer-mode auto --enable-chunked-prefill --compilation-config {} "
        "--disable-custom-all-reduce --distributed-executor-backend mp --disable-log-requests -O3 "
        "--enable-auto-tool-choice --tool-call-parser hermes --reasoning-parser qwen3 -pp 1 "
        "--response-role assistant --chat-template-content-format=auto --uvicorn-log-level warning "
        "--enable-request-id-headers --ignore-patterns a b --compilation-config.mode 3 "
        "--api-server-count 4 "
        "--no-enable-expert-parallel --kv_offloading_size 2 --no-return-tokens-as-token-ids"
    )
    assert cli.main(["generate", "--model", "m", *usual.split(), "--prompt", "x"]) == 0
    (call,) = calls
    config = EngineConfig.from_options(**call.options)
    assert set(config.options_without_effect) == {
        "trust_remote_code", "compilation_config", "disable_custom_all_reduce",
        "optimization_level", "uvicorn_log_level", "ignore_patterns", "api_server_count",
    }  # fmt: skip
    assert call.options["compilation_config"] == {"mode": 3}
    assert call.options["ignore_patterns"] == ["a", "b"]
    assert config.reasoning_config == ReasoningConfig(reasoning_parser="qwen3")
    assert config.tool_call_parser == "hermes" and config.swap_space == 2


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ("--uds /tmp/x", "uds='/tmp/x' is not supported: the server listens on host and port."),
        ("--middleware a.b", "middleware='a.b' is not supported: put a proxy"),
        ("--logits-processors a:B c:D", "logits_processors=['a:B', 'c:D'] is not supported: a"),
        ("--no-enable-chunked-prefill", "enable_chunked_prefill=False is not supported: long"),
        ("--distributed-executor-backend=ray", "distributed_executor_backend='ray' is not"),
        ("-pp 2", "pipeline_parallel_size=2 is not supported: one process"),
        ("--return-tokens-as-token-ids", "give return_tokens_as_token_ids with each request"),
        ("--tokenizer-mode", "--tokenizer-mode needs a value"),
        ("--tokenizer-mode --port 3", "--tokenizer-mode needs a value"),
        ("--compilation-config a --compilation-config.mode 3", "compilation_config is already 'a'"),
    ],
)
def test_flags_of_vllm_that_ask_for_what_is_not_there_are_refused(flags, told, capsys):
    assert cli.main(["serve", "m", *flags.split()]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_flags_of_a_command_are_not_taken_for_those_of_vllm(monkeypatch):
    served = []
    monkeypatch.setattr("jaxpage.server.run.bind", lambda options: served.append(options))
    monkeypatch.setattr("jaxpage.pooling.choose.pools", lambda config: True)
    monkeypatch.setattr("jaxpage.pooling.async_pooler.AsyncPooler", served.append)
    monkeypatch.setattr("jaxpage.server.run.run", lambda *_: None)
    flags = "--trust-remote-code m --shutdown-timeout 3 --served-model-name a b --disable-log-stats"
    assert cli.main(["serve", *flags.split(), "--disable-uvicorn-access-log=true"]) == 0
    options, config = served
    assert config.model == "m"
    assert config.options_without_effect == ("trust_remote_code",)
    assert options.shutdown_timeout == 3 and options.served_model_name == ("a", "b")
    assert options.disable_log_stats and options.disable_access_log


def test_values_that_look_like_flags_of_vllm_stay_values():
    for prompt in ("-O3", "-O3 makes gcc fast because", "-cc", "--middleware=x", "--uds is a flag"):
        assert vllm_flags.take(["--prompt", prompt], cli.Generate) == (["--prompt", prompt], {})
    assert vllm_flags.take(["--ignore-eos", "-O3"], cli.Generate) == (
        ["--ignore-eos"],
        {"optimization_level": 3},
    )


DOTTED = {
    "--speculative-config.method ngram --speculative_config.num_speculative_tokens=4": {
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}
    },
    "-sc.model a/b.c -sc.num_speculative_tokens 2": {
        "speculative_config": {"model": "a/b.c", "num_speculative_tokens": 2}
    },
    '--hf-overrides {"a":1,"b":{"c":2}} --hf-overrides.b.d -3.5 --hf-overrides.a null': {
        "hf_overrides": {"a": None, "b": {"c": 2, "d": -3.5}}
    },
    "--logit-bias.42 -1.5": {"logit_bias": {"42": -1.5}},
    "--structured-outputs.json.type object": {"structured_outputs": {"json": {"type": "object"}}},
}


@pytest.mark.parametrize(("flags", "expected"), DOTTED.items(), ids=list(DOTTED))
def test_keys_of_an_option_in_json_may_be_flags(flags, expected):
    left, options = vllm_flags.take(["--prompt", "-sc.x", *flags.split()], cli.Generate)
    assert options == {} and left[:2] == ["--prompt", "-sc.x"]
    ((name, value),) = expected.items()
    assert left[2:] == [f"--{name.replace('_', '-')}", json.dumps(value)]


def test_an_object_has_the_place_of_its_first_key():
    flags = "-sc.method ngram --stop a b -sc.num_speculative_tokens 2 --no-ignore-eos"
    left, _ = vllm_flags.take(["--prompt", "--speculative-config", *flags.split()], cli.Generate)
    value = '{"method": "ngram", "num_speculative_tokens": 2}'
    assert left == [
        *("--prompt", "--speculative-config", "--speculative-config", value),
        *("--stop", "a", "b", "--no-ignore-eos"),
    ]


def test_keys_are_flags_of_commands_without_an_engine_too(capsys):
    names = (
        "--speculative-config.method ngram --speculative-config.num_speculative_tokens 3".split()
    )
    left, _ = vllm_flags.take(["m", *names, "--tp", "auto"], Plan)
    given = {"method": "ngram", "num_speculative_tokens": 3}
    assert left == ["m", "--speculative-config", json.dumps(given), "--tp", "auto"]
    assert vllm_flags.take(["--compilation-config.mode", "3"], Plan)[0] != []
    for flags, told in (
        ("--speculative-config.method", "--speculative-config.method needs a value"),
        ("-sc.method --tp 2", "-sc.method needs a value"),
        ("-sc.method ngram -sc.method.x 3", "-sc.method.x: method is already 'ngram'"),
        ("-sc. 3", "-sc. names no key"),
    ):
        assert cli.main(["plan", "m", *flags.split()]) == 2
        error = capsys.readouterr().err
        assert told in error and error.count("\n") == 1
    # Others are reported as before.
    with pytest.raises(SystemExit):
        cli.main(["plan", "m", "--tp.x", "3"])
    assert "Unrecognized options: --tp.x" in capsys.readouterr().err


def test_flags_of_vllm_may_name_keys_of_an_option():
    flags = ["-cc.mode=3", "--compilation-config.a.b", "4", "--no-disable-uvicorn-access-log"]
    left, options = vllm_flags.take(flags, cli.Generate)
    assert left == [] and options["compilation_config"] == {"mode": 3, "a": {"b": 4}}
