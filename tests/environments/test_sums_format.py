"""The checkpoint of the sums writes its calls in the form that the calculator reads and answers."""

from podrl.data.sums import GENERATOR
from podrl.data.template import CALL_END
from podrl.environments.calculator import calculator
from podrl.environments.calls import QUERY, ToolOutput, format_of


def test_calls_are_read_and_outputs_written_as_in_the_examples():
    tags = format_of("call_tool", ["calculator"])
    for index in range(50):
        found = GENERATOR.problem("train", index)
        call, output, _ = found.called()
        (read,) = tags.calls(call.text, CALL_END)
        assert (read.name, read.arguments) == ("calculator", {QUERY: found.expression})
        assert tags.observation([ToolOutput([calculator(found.expression)])], "").text == output.text
