"""A taskset of verifiers: sums, with a harness that asks the model twice without a program of its own."""

import sys

import verifiers.v1 as vf
from openai import AsyncOpenAI
from verifiers.v1.harnesses.null import NullHarness, NullHarnessConfig
from verifiers.v1.runtimes import ProgramResult
from verifiers.v1.tasksets.harbor import HarborData, HarborTask

__all__ = ["Asks", "Sums"]


class Data(vf.TaskData):
    answer: str = ""


class Sum(vf.Task[Data]):
    @vf.reward
    async def numbers(self, task, trace) -> float:
        last = [node.message.content for node in trace.nodes if node.sampled][-1] or ""
        return float(any(char.isdigit() for char in str(last))) + 0.25 * float(task.answer)


class SumsConfig(vf.TasksetConfig):
    largest: int = 3
    changed: bool = False
    harbor: bool = False


class Sums(vf.Taskset[Sum, SumsConfig]):
    def load(self):
        sys.stdout.write("a line that is not a record\n")
        if self.config.harbor:
            yield HarborTask(HarborData(prompt="Write a file."))
        for i in range(self.config.largest):
            prompt = f"{i}-1=" if self.config.changed else f"{i}+1="
            yield Sum(Data(prompt=prompt, answer=str(i + 1)), self.config.task)


class AsksConfig(NullHarnessConfig):
    pass


class Asks(NullHarness):
    async def setup(self, runtime):
        return None

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0, timeout=None)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            reply = await client.chat.completions.create(model=ctx.model, messages=messages)
            messages.append(reply.choices[0].message.model_dump(exclude_none=True))
            messages.append({"role": "user", "content": "Again."})
        return ProgramResult(0, "", "")
