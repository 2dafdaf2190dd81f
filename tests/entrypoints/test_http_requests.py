"""What single requests and their headers do."""

import json
from typing import Any

import pytest

from tests.entrypoints.http_server import HTTPServer, http_config, logged, tokenizer
from tests.entrypoints.test_golden_shapes import ERROR_CASES, send

PROMPT = [504, 3575, 282, 4649, 314]


def only_params(server: HTTPServer) -> Any:
    """Sampling parameters of the only sequence since the last call."""
    ((_, params),) = server.params.items()
    server.params.clear()
    return params


@pytest.fixture(autouse=True)
def no_params(server: HTTPServer):
    server.params.clear()


NAMES = {
    "wrong model": ["nope", "smollm2"],
    "max_tokens 0 (no echo)": ["1", "0"],
    "max_tokens over context": ["5000", "2048"],
    "temperature -1": ["-1"],
    "temperature 2.1": ["2", "2.1"],
    "top_p 0": ["1", "0"],
    "top_k -2": ["-1", "0", "-2"],
    "min_p 2": ["[0, 1]", "2"],
    "presence_penalty 3": ["[-2, 2]", "3"],
    "n 0": ["at least 1", "0"],
    "n 100000": ["16384", "100000", "VLLM_MAX_N_SEQUENCES"],
    "logprobs 21 (over max 20)": ["21", "20"],
    "logprobs -1": ["49152", "20"],
    "prompt token out of vocab": ["999999"],
    "stop list of 40": ["4", "40"],
    "stop_token_ids out of vocab": ["999999", "49151"],
    "min_tokens over max_tokens": ["10", "2"],
    "logit_bias non-integer key": ["abc"],
    "logit_bias out of vocab": ["999999", "49151"],
    "truncate_prompt_tokens -2": ["-1", "-2"],
    "truncate_prompt_tokens over context": ["5000", "2048"],
    "cache_salt slash": ["128", "/"],
    "prompt_embeds when off": ["--enable-prompt-embeds"],
    "X-data-parallel-rank out of range": ["[0, 1)"],
    "prompt too long": ["2048", "2049"],
    "chat_template in request": ["--trust-request-chat-template"],
    "top_logprobs 21": ["21", "20"],
    "tool_choice junk": ["required"],
    "response_format schema nonsense type": ["nonsense"],
    "structural_tag bad": ["zzz", "format"],
    "structured two kinds": ["regex", "choice"],
    "structured none": ["none", "json", "regex", "choice", "grammar", "json_object", "structural_tag"],
    "regex invalid": ["([", "unclosed"],
    "regex NUL": ["position 1"],
    "regex lookahead": ["(?=", "position 0"],
    "grammar invalid": ["line 1"],
    "grammar undefined rule": ["foo"],
    "both response_format and structured_outputs": ["json_object", "regex"],
    "schema nested 100 levels": ["64"],
    "malformed json": ["31"],
    "20 MB prompt": ["2048", "20000000"],
}
"""Facts that the message of an error carries."""


@pytest.mark.parametrize(("section", "case"), [c for c in ERROR_CASES if c.values[1]["name"] in NAMES])
def test_messages_carry_the_facts(server: HTTPServer, section: str, case: Any):
    message = send(server, case).json()["error"]["message"]
    for fact in NAMES[case["name"]]:
        assert fact in message


def test_the_header_wins_over_the_body_request_id(server: HTTPServer):
    answer = server.client.post(
        "/v1/completions", json={"prompt": "x", "max_tokens": 1, "request_id": "b"}, headers={"X-Request-Id": "h"}
    )
    assert answer.json()["id"] == "cmpl-h"


@pytest.mark.parametrize(
    ("side", "kept"), [(None, PROMPT[-2:]), ("left", PROMPT[-2:]), ("right", PROMPT[:2])],
)  # fmt: skip
def test_truncation(server: HTTPServer, side: str | None, kept: list[int]):
    for prompt in (PROMPT, tokenizer().decode(PROMPT)):
        answer = server.complete(
            prompt=prompt, truncate_prompt_tokens=2, truncation_side=side, return_token_ids=True, max_tokens=1
        )
        assert answer.json()["choices"][0]["prompt_token_ids"] == kept


def test_truncation_to_the_context_leaves_room_for_one_token(server: HTTPServer):
    answer = server.complete(prompt="a " * 5000, truncate_prompt_tokens=-1).json()
    assert answer["usage"]["prompt_tokens"] == 2047
    assert answer["usage"]["completion_tokens"] == 1


def test_chat_truncation_keeps_the_end(server: HTTPServer):
    answer = server.chat(truncate_prompt_tokens=3, return_token_ids=True, max_tokens=1).json()
    assert answer["prompt_token_ids"] == tokenizer().encode("<|im_start|>assistant\n")[-3:]


def test_unknown_fields_are_tolerated_and_logged_once(server: HTTPServer):
    with logged("vllm_clone.entrypoints.openai.requests") as messages:
        for _ in range(2):
            assert server.complete(max_tokens=1, never_heard_of=1).status_code == 200
    assert [m for m in messages if "never_heard_of" in m] == messages
    assert len(messages) == 1


def test_extension_arguments_reach_the_engine(server: HTTPServer):
    assert server.complete(max_tokens=1, vllm_xargs={"a": [1, "b"]}).status_code == 200
    assert only_params(server).extra_args == {"a": [1, "b"]}


def test_a_message_never_shows_paths_or_addresses(server: HTTPServer):
    message = server.complete(model="/root/models/secret").json()["error"]["message"]
    assert "<path>" in message
    assert "secret" not in message


def test_keys_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_API_KEY", "from-env")
    with HTTPServer() as server:
        assert server.client.get("/v1/models").status_code == 401
        assert server.client.get("/v1/models", headers={"Authorization": "Bearer from-env"}).status_code == 200


def test_any_of_several_keys_opens():
    with HTTPServer(api_key=["one", "two"]) as server:
        for key, status in (("one", 200), ("two", 200), ("three", 401), ("zwö", 401)):
            value = f"Bearer {key}".encode()
            assert server.client.get("/v1/models", headers={"Authorization": value}).status_code == status


@pytest.mark.parametrize("root", ["/", "/v", "/v1", "/api"])
def test_no_root_path_opens_a_guarded_route(root: str):
    """Whatever the prefix, a path that reaches a guarded route needs the key."""
    with HTTPServer(api_key=["key"], root_path=root) as server:
        for path in ("/v1/models", root.rstrip("/") + "/v1/models"):
            assert server.client.get(path).status_code in (401, 404)
        reached = server.client.get(root.rstrip("/") + "/v1/models", headers={"Authorization": "Bearer key"})
        assert reached.status_code == 200
        assert server.client.get("/health").status_code == 200


def test_malformed_bodies_with_surrogates_are_the_clients_mistake(server: HTTPServer):
    for body in (rb'{"prompt": "\ud800", ', rb'{"prompt": "\ud800\xff"}', rb'{"a": "\ud83d", "b": ' + b"[" * 100_000):
        answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400


def test_too_many_prompts(server: HTTPServer):
    answer = server.complete(prompt=["x"] * 1025)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


def test_generation_config_defaults():
    config = http_config(generation_defaults={"temperature": 0.6, "top_k": 7, "max_tokens": 5})
    with HTTPServer(config) as server:
        server.client.post("/v1/completions", json={"prompt": "x"})
        params = only_params(server)
        assert (params.temperature, params.top_k, params.max_tokens) == (0.6, 7, 5)
        server.client.post("/v1/completions", json={"prompt": "x", "temperature": 0.9, "top_k": 3, "max_tokens": 2})
        params = only_params(server)
        assert (params.temperature, params.top_k, params.max_tokens) == (0.9, 3, 2)
        answer = server.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}]})
        assert answer.json()["usage"]["completion_tokens"] == 5


def test_server_wide_token_ids_as_tokens():
    with HTTPServer(return_tokens_as_token_ids=True) as server:
        server.script = [[7042]]
        logprobs = server.complete(max_tokens=1, logprobs=1).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == ["token_id:7042"]
        assert set(logprobs["top_logprobs"][0]) == {"token_id:7042"}
        plain = server.complete(max_tokens=1, logprobs=1, return_tokens_as_token_ids=False).json()
        assert plain["choices"][0]["logprobs"]["tokens"] == [" Paris"]


def test_forced_usage_in_streams():
    with HTTPServer(enable_force_include_usage=True) as server:
        blocks = server.complete(max_tokens=2, stream=True).text.split("\n\n")
        chunks = [json.loads(b.removeprefix("data: ")) for b in blocks if b and "[DONE]" not in b]
        assert [c["usage"]["completion_tokens"] for c in chunks] == [1, 2, 2]
        assert chunks[-1]["choices"] == []


def test_a_server_without_tokenizer_takes_token_ids():
    with HTTPServer(http_config(skip_tokenizer_init=True), with_tokenizer=False) as server:
        answer = server.complete(prompt=PROMPT, max_tokens=1, return_token_ids=True).json()
        assert answer["choices"][0]["token_ids"] == [30]
        assert server.complete(prompt="text").status_code == 400
        assert server.complete(prompt=PROMPT, echo=True, stream=True).status_code == 400
        assert server.chat().status_code == 400
        assert server.client.post("/tokenize", json={"prompt": "text"}).status_code == 400


def test_docs_can_be_switched_off(server: HTTPServer):
    assert server.client.get("/openapi.json").status_code == 200
    assert server.client.get("/docs").status_code == 200
    with HTTPServer(disable_fastapi_docs=True) as bare:
        assert bare.client.get("/openapi.json").status_code == 404


def test_trusted_templates(server: HTTPServer):
    template = "{{ messages[0].content }}!"
    assert server.chat(chat_template=template).status_code == 400
    with HTTPServer(trust_request_chat_template=True) as trusting:
        for extra in ({"chat_template": template}, {"chat_template_kwargs": {"chat_template": template}}):
            answer = trusting.chat(max_tokens=1, return_prompt_text=True, **extra).json()
            assert answer["prompt_text"] == "Say hi.!"


def test_tokenize_and_detokenize_are_inverse(server: HTTPServer):
    text = "Ünïcödé 🙂 <|im_start|> x"
    ids = server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]
    assert server.client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": text}


@pytest.mark.parametrize("field", ["stop", "model", "cache_salt", "request_id", "user"])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(server: HTTPServer, field: str):
    body = json.dumps({"prompt": "x", "max_tokens": 1, field: "\ud800"})
    answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert "Unicode" in answer.json()["error"]["message"]


def test_a_whole_surrogate_pair_is_a_character(server: HTTPServer):
    body = json.dumps({"prompt": "🙂", "max_tokens": 1, "echo": True})
    answer = server.client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"].startswith("🙂")


def test_integers_beyond_64_bits_are_refused_before_a_stream_begins(server: HTTPServer):
    big = str(2**70)
    answer = server.client.post(
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 1, "stream": True},
        headers={"X-Vllm-Priority": big},
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "priority")
    assert server.complete(max_tokens=1, stream=True, repetition_detection={"min_count": 2**70}).status_code == 400
    assert server.complete(max_tokens=1, temperature=1, top_k=2**70).status_code == 200
    assert server.complete(max_tokens=1, stream_interval=2**70, stream=True).status_code == 200


def test_every_streamed_choice_echoes_the_scores_of_the_prompt(server: HTTPServer):
    body = {"prompt": PROMPT, "max_tokens": 2, "echo": True, "logprobs": 1, "n": 3, "temperature": 1, "seed": 1}
    plain = server.complete(**body).json()["choices"]
    streamed: dict[int, list[Any]] = {0: [], 1: [], 2: []}
    for line in server.complete(**body, stream=True).text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                streamed[choice["index"]] += choice["logprobs"]["token_logprobs"]
    for choice in plain:
        assert [s is None for s in streamed[choice["index"]]] == [True] + [False] * (len(PROMPT) + 1)
        assert [s is None for s in choice["logprobs"]["token_logprobs"]] == [True] + [False] * (len(PROMPT) + 1)
