"""Calls as models write them, outputs as models read them, and the cut of outputs that are too long."""

import html
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podrl.environments import calls, dr_tulu
from podrl.environments.calls import QUERY, SEPARATOR, ToolOutput, format_of, in_template

FORMS = {"call_tool": ("call_tool", ["</call_tool>", "</call>"]), "tool": ("tool", ["</tool>"])}
WORDS = st.text(alphabet=st.characters(codec="utf-8", exclude_characters="<\r"), max_size=20)
NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda name: name != "name")


@given(
    form=st.sampled_from(sorted(FORMS)),
    attributes=st.dictionaries(NAMES, WORDS, max_size=4),
    tool=NAMES,
    query=WORDS,
    before=WORDS,
    data=st.data(),
)
def test_attributes_are_read_in_any_order_and_quote(form, attributes, tool, query, before, data):
    tag, closings = FORMS[form]
    pairs = data.draw(st.permutations([*attributes.items(), ("name", tool)]))
    opening = ""
    for name, value in pairs:
        quote = data.draw(st.sampled_from("\"'"))
        opening += f" {name} = {quote}{html.escape(value)}{quote}"
    stop = data.draw(st.sampled_from(closings))
    (call,) = format_of(form, [tool]).calls(f"{before}<{tag}{opening}>{query}{stop}", stop)
    assert (call.name, call.problem) == (tool, "")
    assert call.arguments == {**attributes, QUERY: query.strip()}


PARSERS = ["call_tool", "tool", "legacy", "hermes", "json"]
PIECES = [
    *("<call_tool", "<call_tool>", "</call_tool>", "</call>", "<tool", "</tool>", "<t>", "</t>", "<tool_call>"),
    *("</tool_call>", "<think>", "</think>", "<tool_cal>", "<t", "</", "```json\n", "```", "<|python_tag|>"),
    *('{"arguments": ', '{"tool_calls": [', '\\"', "<tool_call>["),
    *(' name="t"', " name='t'", " x=", ">", '{"name": "t", "arguments": {', '{"name": "t"}'),
    *('{"x":', "[", "{", "}", "]", '"', "'", "\\", ","),
    *(";", ":", " ", "\n", "NaN", "1e999", "9" * 50, "-", "\\ud800", "\ud800", "é", "null", '"name": ', '"function": '),
]  # fmt: skip
SCHEMAS = [{}, {"properties": {"x": True, "n": {"type": ["integer", "null"]}, "l": {"anyOf": [{"type": "array"}]}}}]


def read(parser, text):
    """Gives a text to every function of the package that reads words of models or tools; returns the calls in it."""
    form = format_of(parser, ["t"])
    found = [call for stop in [*form.stop, "eos", "length"] for call in form.calls(text, stop)]
    found += [call for stop in form.stop for call in form.calls(text + stop, stop)]
    for call in found:
        assert (call.problem or call.name) and len(call.problem) < 400
        for schema in SCHEMAS:
            fitted = calls.fitted(dr_tulu.arguments("t", call.arguments, schema), schema, "query")
            json.loads(json.dumps({"frame": {"in": {"frames": fitted}}}))  # as in the message to the tool
    for text_ in (text, json.dumps(text)):
        assert all(isinstance(one, str) for one in dr_tulu.documents(text_))
    for kind in ("integer", "number", "boolean", "array", "object"):
        calls.fitted({"x": text}, {"properties": {"x": {"type": kind}}}, "query")
    assert "<tool_call>" not in calls.escaped(text)
    return found


@given(
    parser=st.sampled_from(PARSERS),
    text=st.lists(st.sampled_from(PIECES) | st.text(max_size=8), max_size=25).map("".join),
)
def test_any_text_is_read_or_refused(parser, text):
    read(parser, text)


@pytest.mark.parametrize("parser", PARSERS)
def test_time_is_linear_in_the_length(parser):
    """Repeats each piece and each pair of pieces: a quadratic reader would take minutes here."""
    for first in PIECES:
        read(parser, first * (200_000 // len(first)))
        read(parser, f"{first} \n" * 20_000)
        read(parser, f'<call_tool name="t" x="{first * 10_000}')
    for first, second in zip(PIECES, [*PIECES[7:], *PIECES[:7]], strict=True):
        read(parser, (first + second) * 5_000)
        read(parser, first * 5_000 + second * 5_000)


ONE = '{"name": "t", "arguments": {"x": 1}}'
TURNED = '{"arguments": {"x": 1}, "name": "t"}'


@pytest.mark.parametrize(
    ("parser", "text", "wanted"),
    [
        ("hermes", f"<tool_call>{ONE}", "not closed"),
        ("hermes", f"<tool_call>{ONE[:-8]}</tool_call>", "no JSON"),
        ("hermes", f"<tool_call><tool_call>{ONE}</tool_call></tool_call>", ["t"]),
        ("hermes", f"<tool_call>```json\n{ONE}\n```</tool_call>", ["t"]),
        ("hermes", f"<tool_call>[{ONE}, {ONE}]</tool_call>", ["t", "t"]),
        ("hermes", f"<tool_call>{ONE}\n{ONE}</tool_call>", ["t", "t"]),
        ("hermes", f"<tool_call>{ONE}<tool_call>{ONE}</tool_call>", "not closed"),
        ("hermes", f"<toolcall>{ONE}</toolcall>", "between <tool_call>"),
        ("hermes", f"<tool_cal>{ONE}</tool_call>", "between <tool_call>"),
        ("hermes", f"<|tool_call|>{ONE}<|/tool_call|>", "between <tool_call>"),
        ("hermes", f"{ONE}</tool_call>", "between <tool_call>"),
        ("hermes", ONE, "between <tool_call>"),
        ("hermes", f"<think>I may <tool_call>{ONE}</tool_call></think>The answer is 4.", []),
        ("hermes", f"I may <tool_call>{ONE}</tool_call></think>The answer is 4.", []),
        ("hermes", f"<think>hm</think><tool_call>{ONE}</tool_call><think>again</think>", ["t"]),
        ("hermes", f"<think>I do <tool_call>{ONE}</tool_call>", "no end"),
        ("hermes", '<tool_call>{"name": "t", "arguments": {"x": "</tool_call>"}}</tool_call>', ["t"]),
        ("hermes", '<tool_call>{"name": "t", "arguments": [1]}</tool_call>', "must be an object"),
        ("hermes", '<tool_call>{"name": "t", "arguments": {"x": NaN}}</tool_call>', "no finite number"),
        ("hermes", "<tools> are of no use here; {} is the answer", []),
        ("json", ONE, ["t"]),
        ("json", f"```json\n{ONE}\n```", ["t"]),
        ("json", f"[{ONE}, {ONE}]", ["t", "t"]),
        ("json", f"{ONE}; {ONE}", ["t", "t"]),
        ("json", f"<|python_tag|>{ONE}{ONE}", ["t", "t"]),
        ("json", f"I look it up.\n```\n{ONE}\n```", ["t"]),
        ("json", ONE[:-8], "no JSON"),
        ("json", f"I look it up: {ONE[:-8]}", "no JSON"),
        ("json", f"{ONE} I am sure.", "no JSON"),
        ("json", f"By {ONE} I got 4.", []),
        ("json", f"<think>{ONE}</think>4", []),
        ("json", '{"type": "function", "function": {"name": "t", "parameters": {"x": 1}}}', ["t"]),
        ("json", '{"name": "other", "parameters": {}}', ["other"]),
        ("json", '{"name": "t"}', ["t"]),
        ("json", '{"name": "Alice", "age": 3}', []),
        ("json", f'The file says {{"name": "Bob"}}. I will search. {ONE}', ["t"]),
        ("json", f'{{"name": "Bob"}} is in the file. I will search. {ONE}', ["t"]),
        ("json", f'The file says {{"name": "Bob", "age": . I will search. {ONE}', ["t"]),
        ("json", f"I call {TURNED}", ["t"]),
        ("json", TURNED[:-8], "no JSON"),
        ("json", '{"tool": "t", "arguments": {"x": 1}}', "must be an object"),
        ("json", 'I call {"tool": "t", "arguments": {"x": 1}}', "must be an object"),
        ("json", '{"nme": "t", "arguments": {"x": 1}}', "must be an object"),
        ("json", '{"tool_name": "t", "parameters": {"x": 1}}', "must be an object"),
        ("json", '{name: "t", arguments: {}}', "no JSON"),
        ("json", f'{{"function_call": {ONE}}}', ["t"]),
        ("json", f'{{"tool_calls": [{{"type": "function", "function": {ONE}}}, {ONE}]}}', ["t", "t"]),
        ("json", f"<tool_call>{ONE}</tool_call>", "must end the turn"),
        ("json", f"I call ```json\n{ONE}\n``` and wait.", "must end the turn"),
        ("json", f"<answer>{ONE}</answer>", []),
        ("json", '<b>{"name": "t", "arguments": 01}</b>', "must end the turn"),
        ("json", '{"name": "t", "arguments": "42"}', ["t"]),
        ("json", '{"name": "t", "arguments": {"x": "what is <think>"}}', ["t"]),
        ("json", '{"name": "t", "arguments": {"x": "what is </think>"}}', ["t"]),
        ("json", "<t>q</t>", "without tags"),
        ("json", '{"arguments": {"for": ["a"]}, "conclusion": "b"}', []),
        ("hermes", TURNED, "between <tool_call>"),
        ("hermes", f"<tool_cal>{TURNED}</tool_cal>", "between <tool_call>"),
        ("hermes", '<call_tool name="t">q</call_tool>', "between <tool_call>"),
        ("hermes", '<tool_call>{"name": "t", "arguments": {"x": "what is <think>"}}</tool_call>', ["t"]),
        ("hermes", '<tool_call>{"name": "t", "arguments": {"x": "what is </think>"}}</tool_call>', ["t"]),
        ("hermes", '<think>so</think><tool_call>{"name": "t", "arguments": "<think>"}</tool_call>', ["t"]),
        ("hermes", '<tool_call>{"name": "t", "arguments": {"x": "what is <tool_call>"}}</tool_call>', ["t"]),
        (
            "hermes",
            f'<tool_call>{{"name": "t", "arguments": "</tool_call><tool_call>"}}\n{ONE}</tool_call>',
            ["t", "t"],
        ),
        ("hermes", f'<tool_call>{{"x": "cut </tool_call><tool_call>{ONE}</tool_call>', "no JSON"),
        ("json", '[{"answer": 3}, [1]]', []),
        ("call_tool", '<call_tool name="t">q', "not closed"),
        ("call_tool", '<call_tool name="t">q</call_tol>', "not closed"),
        ("call_tool", '<cal_tool name="t">q</cal_tool>', "<cal_tool> calls nothing"),
        ("call_tool", "<caltool> is no call here", []),
        ("call_tool", '<think>as <call_tool name="t"></think>4', []),
        ("tool", '<tool name="t">q', "not closed"),
        ("call_tool", "<call_tools>t</call_tools>", "<call_tools> calls nothing"),
        ("call_tool", "<call-tool>t: q</call-tool>", "<call-tool> calls nothing"),
        ("call_tool", '<call_tool(name="t")>q', "not closed"),
        ("call_tool", "I look it up: <call_tool", "not closed"),
        ("call_tool", "I look it up: <call_tol", "calls nothing"),
        ("call_tool", "<t>q</t>", "No call can be read"),
        ("call_tool", '<tool name="t">q</tool>', "No call can be read"),
        ("call_tool", f"<tool_call>{ONE}</tool_call>", "No call can be read"),
        ("call_tool", ONE, "No call can be read"),
        ("call_tool", "A list: <t>q</t> is an item.", []),
        ("call_tool", '{"name": "Alice", "age": }', []),
        ("legacy", "<t>q", "not closed"),
        ("legacy", "I look it up: <t", "not closed"),
        ("legacy", '<call_tool name="t">q</call_tool>', "No call can be read"),
        ("legacy", "<b>q</b>", []),
    ],
)
def test_no_call_is_lost_or_invented(parser, text, wanted):
    found = format_of(parser, ["t"]).calls(text, "eos")
    if isinstance(wanted, str):
        assert wanted in " ".join(call.problem for call in found)
    else:
        assert [call.name for call in found] == wanted and not any(call.problem for call in found)
    assert format_of(parser, ["t"]).calls(text, "length") == []


def test_a_broken_call_takes_no_other_with_it():
    text = f'<tool_call>{{"x": "cut </tool_call><tool_call>{ONE}</tool_call><tool_call>{TURNED}</tool_call>'
    assert [call.name for call in format_of("hermes", ["t"]).calls(text, "eos")] == ["", "t", "t"]


@pytest.mark.parametrize("words", ["what is <think>", "what is </think>", "<think> and </think>", "</think><think>"])
@pytest.mark.parametrize(
    ("parser", "opening"), [("call_tool", '<call_tool name="t">'), ("tool", '<tool name="t">'), ("legacy", "<t>")]
)
def test_tags_of_thoughts_in_a_call_are_words(parser, opening, words):
    form = format_of(parser, ["t"])
    for before in ("", "<think>so</think>", "so</think>", f"<think>{opening}draft{form.stop[0]}</think>"):
        (call,) = form.calls(f"{before}{opening}{words}{form.stop[0]}", form.stop[0])
        assert (call.name, call.arguments, call.problem) == ("t", {QUERY: words}, "")
    draft = f"<think>I may {opening}q{form.stop[0]}"
    assert form.calls(draft, form.stop[0]) == [] and form.spoken(draft)[1]


def test_an_answer_is_no_misspelt_tool():
    for tool in ("answers", "answer2", "thinks", "snippets", "webpages"):
        word = tool[:-1]
        assert format_of("legacy", [tool]).calls(f"It is clear. <{word}>42</{word}>", "eos") == []
    assert format_of("legacy", ["search"]).calls("<serch>42</serch>", "eos")


def test_arguments_that_are_no_object_are_the_query():
    for text, wanted in [("42", "42"), ("5+5", "5+5"), ("[1]", "[1]"), ('"q"', '"q"')]:
        (call,) = format_of("json", ["t"]).calls(json.dumps({"name": "t", "arguments": text}), "eos")
        assert call.arguments == {QUERY: wanted} and not call.problem
    for text in ("null", "{}"):
        (call,) = format_of("json", ["t"]).calls(json.dumps({"name": "t", "arguments": text}), "eos")
        assert call.arguments == {} and not call.problem


def test_a_closing_tag_ends_its_own_call_only():
    legacy = format_of("legacy", ["a", "b"])
    (call,) = legacy.calls("<b>1 <a>2</b>", "</b>")
    assert (call.name, call.arguments) == ("b", {QUERY: "1 <a>2"})
    assert legacy.calls("<a>2</b>", "</b>")[0].problem


def test_names_of_chat_models():
    asked = {"qwen3": "<tool_call>", "hermes": "<tool_call>", "llama3": "", "gemma": "", "json": ""}
    for parser, tag in asked.items():
        assert in_template(parser) and format_of(parser, ["t"]).tags == ((tag, "</tool_call>") if tag else ())
        (call,) = format_of(parser, ["t"]).calls(f'{tag}{{"name": "t"}}{tag.replace("<", "</")}', "eos")
        assert call.name == "t"
    assert not any(map(in_template, ["call_tool", "tool", "legacy", "v20250824", "unified"]))


def test_names_of_dr_tulu():
    assert format_of("v20250824", []).stop == ("</call_tool>", "</call>")
    assert format_of("unified", []).stop == ("</tool>",)
    legacy = format_of("legacy", ["google_search", "browse_webpage"])
    assert legacy.stop == ("</google_search>", "</browse_webpage>")
    (call,) = legacy.calls("I look: <google_search> jax </google_search>", "</google_search>")
    assert (call.name, call.arguments) == ("google_search", {QUERY: "jax"})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no opening</call_tool>", "No tool call can be read"),
        ("<call_tool>query</call_tool>", "names no tool"),
        ('<call_tool name="t" x=>q</call_tool>', "No tool call can be read"),
    ],
)
def test_what_cannot_be_read_is_said(text, said):
    (call,) = format_of("call_tool", ["t"]).calls(text, "</call_tool>")
    assert call.problem.startswith(said) or said in call.problem
    assert '<call_tool name="TOOL">QUERY</call_tool>' in call.problem


def test_a_turn_that_no_tag_ended_holds_no_call():
    parser = format_of("call_tool", ["t"])
    assert parser.calls("no tag", "eos") == parser.calls('<call_tool name="t">q', "length") == []


def test_json_calls():
    hermes = format_of("hermes", [])
    text = '<tool_call>\n{"name": "a", "arguments": {"x": 1}}\n</tool_call><tool_call>{"name": "b"}</tool_call>'
    assert [(c.name, c.arguments) for c in hermes.calls(text, "eos")] == [("a", {"x": 1}), ("b", {})]
    assert hermes.calls(text, "length") == []
    (bad,) = hermes.calls("<tool_call>{x}</tool_call>", "eos")
    assert bad.problem.startswith("The call is no JSON")
    plain = format_of("json", [])
    (call,) = plain.calls('<|python_tag|>{"name": "a", "parameters": {"x": "y"}}', "eos")
    assert (call.name, call.arguments) == ("a", {"x": "y"})
    assert plain.calls('{"answer": 3}', "eos") == plain.calls("The answer is 3.", "eos") == []
    seen = hermes.observation([ToolOutput(["1"]), ToolOutput([f"2{SEPARATOR}x"])], "id")
    assert seen.text.split(SEPARATOR) == ["1", "2x"]  # the outputs become two messages of role tool
    assert [[seen.text[a:b] for a, b in group] for group in seen.cuts] == [["1"], ["2x"]]


def test_outputs_of_dr_tulu():
    seen = format_of("call_tool", ["t"]).observation([ToolOutput(["one", "two"], "snippet")], "5f1c09ab")
    assert seen.text == (
        "\n<tool_output><snippet id=5f1c09ab-0>\none\n</snippet>\n<snippet id=5f1c09ab-1>\ntwo\n</snippet>"
        "</tool_output>\n\n"
    )
    assert [[seen.text[a:b] for a, b in group] for group in seen.cuts] == [["one", "two"]]
    assert format_of("legacy", ["t"]).observation([ToolOutput(["one"], "webpage")], "5f1c09ab").text == (
        "\n<webpage id=5f1c09ab>\none\n</webpage>\n\n"
    )
    assert format_of("tool", ["t"]).observation([ToolOutput(["3"])], "").text == "\n<tool_output>3</tool_output>\n\n"


def test_ids_follow_from_the_sample_and_the_call():
    ids = {calls.call_id(key, number) for key in ("a", "b") for number in range(3)}
    assert len(ids) == 6 and calls.call_id("a", 0) in ids and all(len(one) == 8 for one in ids)


@given(st.text(max_size=30), st.sampled_from(["tool_output", "snippet", "answer", "call_tool", "tool_response"]))
def test_a_tool_cannot_write_tags_that_mean_something(text, tag):
    seen = format_of("call_tool", ["t"]).observation([ToolOutput([f"{text}</{tag}><{tag}><|im_end|>"])], "").text
    inside = seen.removeprefix("\n<tool_output>").removesuffix("</tool_output>\n\n")
    assert f"<{tag}" not in inside and f"</{tag}" not in inside and "<|" not in inside
    assert calls.escaped("a < b <i>c</i>") == "a < b <i>c</i>"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(1, 20))
def test_what_is_too_long_loses_its_middle(lengths, limit):
    texts = ["".join(chr(97 + i % 26) for i in range(n)) for n in lengths]
    seen = format_of("call_tool", ["t"]).observation([ToolOutput(texts, "snippet")], "id")
    cut = calls.shortened(seen.text, seen.cuts, limit, encode=lambda text: [ord(c) for c in text],
                          decode=lambda ids: "".join(map(chr, ids)))  # fmt: skip
    if sum(lengths) <= limit:
        assert cut == seen.text
        return
    rest = cut.replace("<tool_output>", "").replace("</tool_output>", "")
    kept = 0
    for index, text in enumerate(texts):
        opening = f"<snippet id=id-{index}>\n"
        inside = rest[rest.index(opening) + len(opening) :].partition("\n</snippet>")[0]
        head, note, tail = inside.partition(" ... [")
        number, _, tail = tail.partition(" tokens left out] ... ")
        assert text.startswith(head) and text.endswith(tail)
        assert len(head) + len(tail) + int(number or 0) == len(text)
        assert abs(len(head) - len(tail)) <= 1 or not note
        kept += len(head) + len(tail)
    assert limit - len(texts) < kept <= limit


def test_words_become_what_the_schema_asks():
    schema = {
        "properties": {
            "n": {"type": "integer"},
            "x": {"type": "number"},
            "b": {"type": "boolean"},
            "l": {"type": "array"},
        }
    }
    given_ = {"n": "8", "x": "0.5", "b": "True", "l": "[1]", "other": "8", QUERY: "q"}
    assert calls.fitted(given_, schema, "url") == {"n": 8, "x": 0.5, "b": True, "l": [1], "other": "8", "url": "q"}
    assert calls.fitted({"n": "eight", "x": "inf"}, schema, "url") == {"n": "eight", "x": "inf"}


@pytest.mark.parametrize(
    ("given_", "schema", "wanted"),
    [
        ({QUERY: ""}, {"properties": {}}, {}),
        ({QUERY: "x"}, {"properties": {}}, {"query": "x"}),
        ({QUERY: ""}, {"properties": {"query": {}}, "required": ["query"]}, {"query": ""}),
        ({QUERY: ""}, {"properties": {"query": {}}}, {}),
        ({QUERY: "", "query": "x"}, {"properties": {"query": {}}, "required": ["query"]}, {"query": "x"}),
    ],
)
def test_text_between_tags_is_left_out_where_nothing_is_asked_for(given_, schema, wanted):
    assert calls.fitted(given_, schema, "query") == wanted


def test_documents_of_its_servers():
    scholar = {"data": [{"snippet": {"text": " s "}, "paper": {"title": "T"}}, {"snippet": {"text": ""}, "paper": {}}]}
    assert dr_tulu.documents(json.dumps(scholar)) == ["Title: T\nSnippet: s"]
    serper = {"organic": [{"title": "T", "link": "http://l", "snippet": "s"}]}
    assert dr_tulu.documents(json.dumps(serper)) == ["Title: T\nURL: http://l\nSnippet: s"]
    massive = {"data": [{"passage": "p", "score": 0.3}]}
    assert dr_tulu.documents(json.dumps(massive)) == ["Title: No title available\nSnippet: p"]
    page = {"success": True, "url": "u", "markdown": "# m", "metadata": {"title": "T"}}
    assert dr_tulu.documents(json.dumps(page)) == ["Title: T\nURL: u\nSnippet: # m"]
    assert dr_tulu.documents('{"data": []}') == [dr_tulu.NO_RESULTS]
    assert dr_tulu.documents('{"error": "quota"}') == ["Query failed: quota"]
    assert dr_tulu.documents("plain words") == ["plain words"]


def test_arguments_in_the_servers_words():
    schema = {"properties": {"query": {}, "num_results": {"type": "integer"}}, "required": ["query"]}
    assert dr_tulu.arguments("google_search", {"query": "q", "limit": "8"}, schema) == {
        "query": "q",
        "num_results": "8",
    }
    assert dr_tulu.arguments("mine", {"limit": "8"}, schema) == {"limit": "8"}
    assert dr_tulu.query_of(schema) == "query"
    assert dr_tulu.query_of({"properties": {"webpage_url": {}, "timeout": {}}}) == "webpage_url"
    assert dr_tulu.query_of({"properties": {"a": {}, "expression": {}}, "required": ["expression"]}) == "expression"
