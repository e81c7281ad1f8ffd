"""Tests the page of podrl.serve: which request continues which answer, why a branch begins, and that HTML is
escaped."""

import re

from podrl.environments.front_page import FrontPage
from podrl.environments.wire import chat, completions
from podrl.environments.wire.requests import Answer, Choice

USER, MORE = ({"role": "user", "content": text} for text in ("2 + 3?", "<script>alert(1)</script>"))
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call>'


def test_requests_stand_below_the_answers_that_they_go_on_from():
    page = FrontPage("hermes")

    def add(messages, prompt, sampled, text="5", tools=()):
        request = chat.read({"messages": messages, "tools": list(tools)}, ["policy"], "hermes")
        page.add(request, Answer("id", 0, prompt, [Choice(text, sampled, [0.0] * len(sampled), (), "eos")]))

    assert "No request has been answered yet." in page.html().decode()
    said = {"role": "assistant", "content": "5"}
    add([USER], [1, 2], [3])
    add([USER, said, MORE], [1, 2, 3, 4], [5], text="So?")  # goes on with request 1
    add([USER, said, MORE], [1, 2, 3, 4], [6])  # goes on with request 1, too
    add([USER, said, MORE], [1, 7, 4], [8])
    add([USER, said, MORE], [9, 4], [8], tools=[ADD], text=CALL)
    add([USER, {"role": "assistant", "content": "6"}, MORE], [9, 9], [8])
    add([MORE], [0], [8])
    text = page.html().decode()
    marks = {"<details": "(", "</details": ")"}
    found = re.findall(r"</?details|request \d", text)
    assert "".join(marks.get(each, each[-1]) for each in found) == "(7)(6)(5)(4)(1(2)(3))"
    whys = dict(re.findall(r"request (\d) <b>([^<:]*)", text))
    assert whys == {
        "1": "a new conversation",
        "2": "",
        "3": "concurrent",
        "4": "template",
        "5": "tools",
        "6": "history",
        "7": "a new conversation",
    }
    assert "4 tokens read, 1 of them new; 1 sampled" in text and text.count("2 + 3?") == 4
    assert "<script>" not in text and "&lt;script&gt;" in text
    assert "<b>assistant</b> calls add({&quot;a&quot;: 2})" in text


def test_a_text_without_messages_is_shown():
    page = FrontPage("hermes")
    page.add(completions.read({"prompt": "Once"}, ["policy"], ""), Answer("id", 0, [1], [Choice(" upon", [2], [0.0])]))
    assert "<b>prompt</b> Once" in page.html().decode() and " upon" in page.html().decode()
