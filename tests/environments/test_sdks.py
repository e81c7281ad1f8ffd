"""Tests the SDKs of agents whose packages are installed: answers, calls of tools, streams."""

import asyncio
import dataclasses
import threading

import pytest

from podrl.environments.front import FrontSettings
from podrl.environments.wire.requests import Answer, AnswerPart, Choice
from podrl.serve import PolledFront
from podrl.workers.user_code import Limits

pytest.importorskip("httptools", reason="needs the extra [agents]")
CALL = '<call_tool name="calculator">4+5</call_tool>'
SCHEMA = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
DESCRIBED = {"name": "calculator", "description": "Adds."}


def reply(request):
    """Answers as a model would: with a call if it has tools and no output yet, else with the output."""
    last = request.model_request.messages[-1]
    if last["role"] == "tool":
        text, stop = f"It is {last['content']}.", "eos"
    else:
        text, stop = (CALL, "</call_tool>") if request.model_request.tools else ("Hello.", "eos")
    return Answer("a1", 5, [1, 2, 3], [Choice(text, [4, 5], [-0.5, -1.5], ["h", "o"], stop)])


@pytest.fixture(scope="module")
def front():
    """Yields a front that answers its requests, which are listed in `seen`."""
    with PolledFront(FrontSettings(context_tokens=64), Limits()) as front:
        done = threading.Event()

        def work():
            while not done.is_set():
                for number, request in front.poll(0.05):
                    if request is None:
                        continue
                    answer = reply(request)
                    if request.model_request.parts:
                        whole = answer.choices[0]
                        first = dataclasses.replace(
                            whole, text=whole.text[:3], tokens=[4], logprobs=[-0.5], pieces=["h"]
                        )
                        front.reply(number, AnswerPart("a1", 5, 0, dataclasses.replace(first, stop="")))
                    front.reply(number, answer)

        thread = threading.Thread(target=work)
        thread.start()
        yield front
        done.set()
        thread.join()


def test_openais_client_speaks_responses(front):
    openai = pytest.importorskip("openai", reason="needs package openai, of the extra [test]")
    tool = {"type": "function", "parameters": SCHEMA, "strict": False, **DESCRIBED}
    with openai.OpenAI(base_url=front.address, api_key=front.key, max_retries=0) as client:
        messages = [{"role": "user", "content": "What is 4+5?"}]
        first = client.responses.create(model="policy", input=messages, tools=[tool])
        (call,) = first.output
        assert (call.name, call.arguments) == ("calculator", '{"query": "4+5"}')
        messages += [item.model_dump(exclude_none=True) for item in first.output]
        messages.append({"type": "function_call_output", "call_id": call.call_id, "output": "9"})
        second = client.responses.create(model="policy", input=messages, tools=[tool])
        assert second.output_text == "It is 9." and second.usage.total_tokens == 5
        with client.responses.stream(model="policy", input="Hi") as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            assert len(deltas) > 1 and "".join(deltas) == stream.get_final_response().output_text == "Hello."
        with pytest.raises(openai.BadRequestError, match="previous_response_id"):
            client.responses.create(model="policy", input="Hi", previous_response_id="resp_1")


def test_anthropics_client_speaks_messages(front):
    anthropic = pytest.importorskip("anthropic", reason="needs package anthropic")
    given = {"model": "policy", "max_tokens": 9}
    tools = [{"input_schema": SCHEMA, **DESCRIBED}]
    with anthropic.Anthropic(base_url=front.address.removesuffix("/v1"), api_key=front.key, max_retries=0) as client:
        messages = [{"role": "user", "content": "What is 4+5?"}]
        first = client.messages.create(**given, messages=messages, tools=tools)
        (call,) = first.content
        assert first.stop_reason == "tool_use" and call.input == {"query": "4+5"}
        messages.append({"role": "assistant", "content": first.content})
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "9"}]})
        second = client.messages.create(**given, messages=messages, tools=tools)
        assert second.content[0].text == "It is 9." and second.usage.input_tokens == 3
        with client.messages.stream(**given, messages=messages[:1]) as stream:
            assert "".join(stream.text_stream) == "Hello."
            assert stream.get_final_message().usage.input_tokens == 3
        with client.messages.stream(**given, messages=messages[:1], tools=tools) as stream:
            assert stream.get_final_message().content[0].input == {"query": "4+5"}
        with pytest.raises(anthropic.BadRequestError, match="thinking"):
            client.messages.create(**given, messages=messages[:1], thinking={"type": "enabled", "budget_tokens": 1024})
    stranger = anthropic.Anthropic(base_url=front.address.removesuffix("/v1"), api_key="x", max_retries=0)
    with stranger, pytest.raises(anthropic.AuthenticationError):
        stranger.messages.create(**given, messages=messages[:1])


@pytest.mark.parametrize("form", ["responses", "chat_completions"])
def test_an_agent_of_openai_agents_uses_its_tool(front, form):
    agents = pytest.importorskip("agents", reason="needs package openai-agents")
    import openai

    def calculator(query: str) -> str:
        """Adds."""
        return str(sum(map(int, query.split("+"))))

    async def run():
        client = openai.AsyncOpenAI(base_url=front.address, api_key=front.key, max_retries=0)
        kind = agents.OpenAIResponsesModel if form == "responses" else agents.OpenAIChatCompletionsModel
        agent = agents.Agent(
            name="Adder", instructions="Add.", model=kind("policy", client), tools=[agents.function_tool(calculator)]
        )
        whole = await agents.Runner.run(agent, "What is 4+5?")
        streamed = agents.Runner.run_streamed(agent, "What is 4+5?")
        async for _ in streamed.stream_events():
            pass
        await client.close()
        return whole.final_output, streamed.final_output

    agents.set_tracing_disabled(True)
    assert asyncio.run(run()) == ("It is 9.", "It is 9.")


def test_an_agent_of_smolagents_uses_its_tool(front):
    smolagents = pytest.importorskip("smolagents", reason="needs package smolagents, with package openai")
    tool = smolagents.tool  # the package warns unless the decorator is written `@tool`

    @tool
    def calculator(query: str) -> str:
        """Adds.

        Args:
            query: sum of whole numbers
        """
        return str(sum(map(int, query.split("+"))))

    # The default of smolagents, tool_choice='required', is refused, because a sampled call cannot be forced.
    given = {"api_base": front.address, "api_key": front.key, "tool_choice": "auto"}
    model = smolagents.OpenAIModel("policy", **given, client_kwargs={"max_retries": 0})
    agent = smolagents.ToolCallingAgent(tools=[calculator], model=model, max_steps=1, verbosity_level=0)
    agent.run("What is 4+5?")
    step = next(step for step in agent.memory.steps if isinstance(step, smolagents.ActionStep))
    assert [call.name for call in step.tool_calls] == ["calculator"] and "9" in step.observations


def test_an_agent_of_pydantic_ai_uses_its_tool(front):
    pydantic_ai = pytest.importorskip("pydantic_ai", reason="needs package pydantic-ai-slim[openai]")
    import openai
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    def calculator(query: str) -> str:
        """Adds."""
        return str(sum(map(int, query.split("+"))))

    async def run():
        async with openai.AsyncOpenAI(base_url=front.address, api_key=front.key, max_retries=0) as client:
            model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
            agent = pydantic_ai.Agent(model, tools=[calculator])
            return (await agent.run("What is 4+5?")).output

    assert asyncio.run(run()) == "It is 9."


@pytest.mark.filterwarnings("ignore:Item:UserWarning")  # litellm's own classes cause this warning
def test_litellm_gets_calls_and_streams(front, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import downloads a list of prices
    litellm = pytest.importorskip("litellm", reason="needs package litellm")
    import openai

    given = {"model": "openai/policy", "api_base": front.address, "api_key": front.key, "max_retries": 0}
    tools = [{"type": "function", "function": {"parameters": SCHEMA, **DESCRIBED}}]
    messages = [{"role": "user", "content": "What is 4+5?"}]
    said = litellm.completion(messages=messages, tools=tools, **given).choices[0].message
    (call,) = said.tool_calls
    assert (call.function.name, call.function.arguments) == ("calculator", '{"query": "4+5"}')
    messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "9"}]
    assert litellm.completion(messages=messages, tools=tools, **given).choices[0].message.content == "It is 9."
    parts = litellm.completion(messages=messages[:1], stream=True, **given)
    assert "".join(part.choices[0].delta.content or "" for part in parts) == "Hello."
    with pytest.raises(litellm.BadRequestError, match="response_format"):
        litellm.completion(messages=messages[:1], response_format={"type": "json_object"}, **given)
    for client in litellm.in_memory_llm_clients_cache.cache_dict.values():
        if isinstance(client, openai.OpenAI):  # an open client would cause a warning in a later test
            client.close()


def test_an_agent_of_langgraph_uses_its_tool(front):
    graph = pytest.importorskip("langgraph.graph", reason="needs package langgraph")
    langchain_openai = pytest.importorskip("langchain_openai", reason="needs package langchain-openai")
    from langgraph.prebuilt import ToolNode, tools_condition

    def calculator(query: str) -> str:
        """Adds."""
        return str(sum(map(int, query.split("+"))))

    given = {"model": "policy", "base_url": front.address, "api_key": front.key}
    model = langchain_openai.ChatOpenAI(**given, stream_chunk_timeout=None, max_retries=0).bind_tools([calculator])
    made = graph.StateGraph(graph.MessagesState)
    made.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
    made.add_node("tools", ToolNode([calculator]))
    made.add_edge(graph.START, "model")
    made.add_conditional_edges("model", tools_condition)
    made.add_edge("tools", "model")
    agent = made.compile()
    asked = {"messages": [{"role": "user", "content": "What is 4+5?"}]}
    assert agent.invoke(asked)["messages"][-1].content == "It is 9."
    parts = [part for part, _ in agent.stream(asked, stream_mode="messages") if part.type == "AIMessageChunk"]
    assert "".join(part.content for part in parts) == "It is 9." and any(part.tool_calls for part in parts)
