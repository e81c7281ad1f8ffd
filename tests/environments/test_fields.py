"""Tests every field of a request: it changes the parsed request, or is refused by its name, or is a documented label.

The names are those of OpenAI's and Anthropic's references and of vLLM; further fields count as unknown.
"""

import copy
import pathlib
import typing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dialects import CHAT, MESSAGES, MODELS, PARSER, RESPONSES

from podrl.environments.wire import chat, completions, fields, generate, messages, responses
from podrl.environments.wire.requests import RefusedRequest

OPENAI = """audio best_of echo frequency_penalty function_call functions logit_bias logprobs max_completion_tokens
max_tokens metadata modalities model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key
prompt_cache_options prompt_cache_retention reasoning_effort response_format safety_identifier seed service_tier stop
store stream stream_options suffix temperature tool_choice tools top_logprobs top_p user verbosity web_search_options
access_programs background background_options context_management conversation image include instructions
max_output_tokens max_tool_calls previous_response_id prompt reasoning text truncation"""
ANTHROPIC = """betas billing_policy cache_control compaction container context_management diagnostics fallbacks
inference_geo mcp_servers output_config output_format service_tier speed stop_sequences system thinking thread top_k
user_profile_id workspace_id"""
VLLM = """add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
chat_template_kwargs continue_final_message detokenize documents extra_args features flat_logprobs guided_json
ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logprob_token_ids
media_io_kwargs min_p min_tokens mm_processor_kwargs output_kind priority prompt_logprobs repetition_detection
repetition_penalty request_id return_prompt_text return_token_ids return_tokens_as_token_ids
routed_experts_prompt_start sampling_params session_id skip_special_tokens spaces_between_special_tokens
stop_token_ids stream_interval structured_outputs thinking_token_budget trace_decode_token_ids truncate_prompt_tokens
truncation_side use_beam_search vllm_xargs watermarking"""
NAMES = sorted({*f"{OPENAI} {ANTHROPIC} {VLLM}".split(), "a_field_of_tomorrow"})
HI = {
    chat: {"messages": [{"role": "user", "content": "hi"}]},
    completions: {"prompt": "hi"},
    generate: {"token_ids": [1]},
    responses: {"input": "hi"},
    messages: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 9},
}
# What the endpoint does without the field, and values that ask for nothing.
SAME = {name: [*values] for name, values in fields.NEUTRAL.items()} | {
    **{name: [False] for name in ("logprobs", "stream", "return_token_ids", "return_tokens_as_token_ids", "store")},
    **{name: [[]] for name in ("stop", "stop_token_ids", "stop_sequences", "tools", "include", "mcp_servers")},
    **{name: [{}] for name in ("stream_options", "sampling_params", "reasoning", "output_config")},
    "n": [1],
    "top_logprobs": [0],
    "model": ["", "policy"],
    "skip_special_tokens": [True],
    "background": [False],
    "parallel_tool_calls": [True, False],
    "tool_choice": ["auto", "none", {}, {"type": "auto"}, {"type": "none"}],
    "truncation": ["disabled"],
    "service_tier": ["auto", "default", "standard_only"],
    "instructions": [""],
    "text": [{}, {"format": {"type": "text"}}],
    "system": ["", []],
    "thinking": [{"type": "disabled"}],
    "max_tokens": [9, 16],  # the number in HI, and the default of /v1/completions
}
# Settings of text, which token ids do not have.
TEXT = ("skip_special_tokens", "include_stop_str_in_output", "spaces_between_special_tokens", "detokenize")
USUAL = [0, 1, 7, 0.5, True, False, "", "x", "auto", "none", [], ["x"], [3], {}, {"type": "text"}, {"x": 1}, ["text"]]
values = st.sampled_from(USUAL) | st.recursive(
    st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=8), inner, max_size=2),
    max_leaves=4,
)


def equal(one, other):
    return one == other and isinstance(one, bool) == isinstance(other, bool)


@pytest.mark.parametrize("dialect", [*HI, "sampling_params"])
@settings(max_examples=500, derandomize=True)
@given(st.sampled_from(NAMES), values)
def test_a_field_is_honoured_or_refused_by_its_name_or_changes_nothing(dialect, name, value):
    within = dialect == "sampling_params"
    dialect = generate if within else dialect
    more = {"sampling_params": {name: value}} if within else {name: value}
    try:
        parsed = dialect.read(HI[dialect] | more, MODELS, PARSER)
    except RefusedRequest as refused:
        assert (refused.param or "").startswith(f"sampling_params.{name}" if within else name)
        return
    if parsed == dialect.read(HI[dialect], MODELS, PARSER):
        labels = (*fields.LABELS, *(["cache_salt"] if dialect is generate else []))
        flag = within and name in TEXT and isinstance(value, bool)
        assert name in labels or flag or any(equal(value, other) for other in SAME.get(name, ())), (name, value)


def test_the_names_are_those_of_openais_client():
    pytest.importorskip("openai", reason="needs package openai, of the extra [test]")
    from openai.types import completion_create_params
    from openai.types.chat import completion_create_params as chat_params
    from openai.types.responses import response_create_params

    bases = [
        chat_params.CompletionCreateParamsBase,
        completion_create_params.CompletionCreateParamsBase,
        response_create_params.ResponseCreateParamsBase,
    ]
    names = {name for base in bases for name in typing.get_type_hints(base)}
    assert names - {"messages", "input"} <= set(NAMES)


# Requests with an object in every place where the dialects take one.
PARTS = copy.deepcopy([CHAT, RESPONSES, MESSAGES])
PARTS[0]["messages"][1]["content"] = [{"type": "text", "text": "What?"}]
PARTS[0]["stream_options"] = {"include_usage": True, "include_obfuscation": False}
PARTS[1]["stream_options"] = {"include_obfuscation": False}
PARTS[2]["tool_choice"] = {"type": "auto"}
FULL: dict[typing.Any, dict[str, typing.Any]] = dict(zip((chat, responses, messages), PARTS, strict=True))
FULL[completions] = HI[completions] | {"stream_options": {"include_usage": True}}
FULL[generate] = HI[generate] | {"stream_options": {"include_usage": True}, "sampling_params": {"logprobs": 1}}
OWN = ("parameters", "input_schema", "metadata", "cache_control")  # objects of the user, and labels


def objects(value, path=()):
    """Yields the paths of all objects within a request that the dialects read."""
    if isinstance(value, dict):
        yield path
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict | list) and key not in OWN and path[-1:] != ("arguments",):
            users = key == "input" and isinstance(value, dict) and value.get("type") == "tool_use"
            yield from () if users else objects(inner, (*path, key))


@pytest.mark.parametrize(("dialect", "path"), [(dialect, path) for dialect in FULL for path in objects(FULL[dialect])])
def test_an_unknown_field_is_refused_wherever_it_stands(dialect, path):
    body = copy.deepcopy(FULL[dialect])
    dialect.read(body, MODELS, PARSER)
    place = body
    for key in path:
        place = place[key]
    place["a_field_of_tomorrow"] = 1
    with pytest.raises(RefusedRequest) as refused:
        dialect.read(body, MODELS, PARSER)
    whole = path[:1] == ("thinking",)  # only one value of this object is served
    assert (refused.value.param or "").endswith("thinking" if whole else "a_field_of_tomorrow")


@pytest.mark.parametrize(
    ("dialect", "path", "name"),
    [
        (responses, ("input", 1, "content", 0), "annotations"),
        (messages, ("system", 0), "citations"),
        (messages, ("messages", 1, "content", 0), "citations"),
        (messages, (), "tool_choice"),
    ],
)
@pytest.mark.parametrize("value", [False, 5, [{"url": "x"}]])
def test_parts_that_no_model_reads_are_refused(dialect, path, name, value):
    body = copy.deepcopy(FULL[dialect])
    place = body
    for key in path:
        place = place[key]
    place[name] = value
    with pytest.raises(RefusedRequest) as refused:
        dialect.read(body, MODELS, PARSER)
    assert (refused.value.param or "").endswith(name)


def test_the_page_names_every_label():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "endpoint.md").read_text()
    assert all(f"`{label}`" in page for label in (*fields.LABELS, "cache_salt", "cache_control", "is_error"))
