"""Chat templates written for these tests: each has the constructs of a published family's template, but not its text.

`{% generation %}` encloses the text that a model of the family writes, up to the end of its turn; `FAMILIES` holds the
same templates without these marks.
"""
# ruff: noqa: E501 - templates are one line, as white space between their tags is text

import dataclasses
import json
import pathlib
import re

import tokenizers

from podrl.data import problems

G, E = "{% generation %}", "{% endgeneration %}"

_JSON_CALLS = (
    "{% for c in m.tool_calls or [] %}{% set f = c.function if c.function is defined else c %}"
    "{{ '\\n' if m.content or not loop.first }}{{ '<tool_call>\\n{\"name\": \"' + f.name + '\", \"arguments\": ' }}"
    "{{ f.arguments if f.arguments is string else f.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
)
_RESPONSES = (
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}"
)
_OPEN_IM = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
_LAST_QUERY = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}"
)
_THOUGHT = (
    "{% set content = m.content if m.content is string else '' %}{% set thought = '' %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}{% elif '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\\n') %}{% endif %}"
)

# Qwen 2.5: a default system message, which lists the tools; arguments always written by tojson.
QWEN25 = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{{ messages[0].content if messages[0].role == 'system' else 'Help.' }}"
    "{{ '\\n# Tools' }}{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>system\\nHelp.<|im_end|>\\n' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' or (m.role == 'system' and not loop.first) %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% elif m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}"
    + G
    + "{% if m.content %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\\n' if m.content or not loop.first }}{{ '<tool_call>\\n{\"name\": \"' }}"
    "{{ c.function.name }}{{ '\", \"arguments\": ' }}{{ c.function.arguments | tojson }}{{ '}\\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>' }}"
    + E
    + "{{ '\\n' }}{% elif m.role == 'tool' %}"
    + _RESPONSES
    + "{% endif %}{% endfor %}"
    + _OPEN_IM
)
_QWEN_HEAD = (
    "{% if tools %}{{ '<|im_start|>system\\n' }}{% for t in tools %}{{ t | tojson }}{{ '\\n' }}{% endfor %}"
    "{{ '<|im_end|>\\n' }}{% endif %}"
)
# Qwen 3: the next question removes the thoughts of earlier turns; a last turn without a thought gets an empty one.
QWEN3 = (
    _QWEN_HEAD + _LAST_QUERY + "{% for m in messages %}{% if m.role in ('user', 'system') %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% elif m.role == 'assistant' %}" + _THOUGHT
    + "{{ '<|im_start|>assistant\\n' }}" + G + "{% if loop.index0 > ns.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}"
    + _JSON_CALLS + "{{ '<|im_end|>' }}" + E + "{{ '\\n' }}{% elif m.role == 'tool' %}" + _RESPONSES
    + "{% endif %}{% endfor %}" + _OPEN_IM
)  # fmt: skip
# Qwen 3 that always thinks: the prompt opens the thought; earlier turns have no thoughts.
QWEN3_OPENS = (
    _QWEN_HEAD + _LAST_QUERY + "{% for m in messages %}{% if m.role in ('user', 'system') %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% elif m.role == 'assistant' %}" + _THOUGHT
    + "{{ '<|im_start|>assistant\\n' }}{% if loop.index0 > ns.last and (loop.last or thought) %}{{ '<think>\\n' }}{% endif %}" + G
    + "{% if loop.index0 > ns.last and (loop.last or thought) %}{{ thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}{% else %}{{ content }}{% endif %}"
    + _JSON_CALLS + "{{ '<|im_end|>' }}" + E + "{{ '\\n' }}{% elif m.role == 'tool' %}" + _RESPONSES
    + "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)  # fmt: skip
# Hermes: calls and outputs of tools stand in ChatML; thoughts are kept as they are.
HERMES = (
    _QWEN_HEAD + "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\\n' }}" + G
    + "{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}{{ c.function | tojson }}"
    "{{ '\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>' }}" + E + "{{ '\\n' }}{% elif m.role == 'tool' %}"
    "{% if loop.previtem.role != 'tool' %}{{ '<|im_start|>tool\\n' }}{% endif %}"
    "{{ '<tool_response>\\n' + m.content + '\\n</tool_response>' }}{% if not loop.last %}{{ '\\n' }}{% endif %}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}{% else %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}" + _OPEN_IM
)  # fmt: skip
# Llama 3.1: contents are stripped; a turn with a call loses its other words; outputs of tools are JSON text.
LLAMA3 = (
    "{{ bos_token }}{{ '<|start_header_id|>system<|end_header_id|>\\n\\n' }}{% if messages[0].role == 'system' %}"
    "{{ messages[0].content | trim }}{% set messages = messages[1:] %}{% endif %}"
    "{% for t in tools or [] %}{{ '\\n' }}{{ t | tojson(indent=4) }}{% endfor %}{{ '<|eot_id|>' }}"
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at once') }}{% endif %}{% set f = m.tool_calls[0].function %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}" + G + "{{ '{\"name\": \"' + f.name + '\", \"parameters\": ' }}"
    "{{ f.arguments | tojson }}{{ '}<|eot_id|>' }}" + E + "{% elif m.role == 'tool' %}"
    "{{ '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}{{ m.content | tojson }}{{ '<|eot_id|>' }}{% else %}"
    "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}{% if m.role == 'assistant' %}" + G
    + "{{ m.content | trim }}{{ '<|eot_id|>' }}" + E + "{% else %}{{ m.content | trim }}{{ '<|eot_id|>' }}{% endif %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)  # fmt: skip
_GEMMA = (
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}"
    "{% if loop.first %}{{ head }}{% endif %}{% if m.role == 'assistant' %}" + G
    + "{{ m.content | trim }}{{ '<end_of_turn>' }}" + E + "{{ '\\n' }}{% else %}{{ m.content | trim }}{{ '<end_of_turn>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)  # fmt: skip
GEMMA2 = (
    "{{ bos_token }}{% set head = '' %}{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}" + _GEMMA
)
GEMMA3 = (
    "{{ bos_token }}{% set head = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
    "{% set head = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}{% endif %}{% for m in turns %}"
    + _GEMMA
)
# Mistral 3: system message and tools stand before the last question; a space before the model's words.
_MISTRAL_CALLS = "{{ '[TOOL_CALLS][' }}{% for c in m.tool_calls %}{{ c.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}{{ ']' }}"
MISTRAL3 = (
    "{% set system = '' %}{% set turns = messages %}{% if messages[0].role == 'system' %}"
    "{% set system = messages[0].content + '\\n\\n' %}{% set turns = messages[1:] %}{% endif %}{{ bos_token }}"
    "{% set asked = turns | selectattr('role', 'equalto', 'user') | list %}{% for m in turns %}{% if m.role == 'user' %}"
    "{% if m == asked[-1] %}{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + system + m.content + '[/INST]' }}{% else %}{{ '[INST] ' + m.content + '[/INST]' }}{% endif %}"
    "{% elif m.tool_calls %}" + G + _MISTRAL_CALLS + "{{ eos_token }}" + E + "{% elif m.role == 'assistant' %}" + G
    + "{{ ' ' + m.content | trim + eos_token }}" + E + "{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS] {\"content\": ' }}{{ m.content | tojson }}{{ '}[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)  # fmt: skip
# Mistral 7: no spaces around marks, a turn for the system message, words before calls.
MISTRAL7 = (
    "{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'system' %}"
    "{{ '[SYSTEM_PROMPT]' + m.content + '[/SYSTEM_PROMPT]' }}{% elif m.role == 'assistant' %}" + G
    + "{{ m.content if m.content else '' }}{% if m.tool_calls %}" + _MISTRAL_CALLS + "{% endif %}{{ eos_token }}" + E
    + "{% else %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}{% endfor %}"
)  # fmt: skip
PHI4 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '<|im_sep|>' }}{% if m.role == 'assistant' %}" + G
    + "{{ m.content + '<|im_end|>' }}" + E + "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)  # fmt: skip
# Phi 3: without a generation prompt, the eos token ends the conversation.
PHI3 = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}" + G + "{{ m.content + '<|end|>' }}" + E
    + "{{ '\\n' }}{% else %}{{ m.content + '<|end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}{% endif %}"
)  # fmt: skip
PHI4_MINI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}" + G + "{{ m.content + '<|end|>' }}" + E
    + "{% else %}{{ m.content + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"
)  # fmt: skip
# DeepSeek R1 distilled: thoughts are never written, the prompt opens a thought, no header opens a turn after a tool.
R1 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content }}{% elif m.role == 'assistant' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<｜Assistant｜>' }}{% endif %}" + G
    + "{{ (m.content or '').split('</think>')[-1] }}{% for c in m.tool_calls or [] %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "{{ '<｜end▁of▁sentence｜>' }}" + E + "{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}"
)  # fmt: skip
# GLM 4.5: a turn ends only where the next one opens; arguments as tags; empty thoughts in earlier turns.
GLM = (
    "{{ '[gMASK]<sop>' }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + _LAST_QUERY
    + "{% for m in messages %}{% set mark = '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' %}"
    "{% if m.role == 'tool' and loop.previtem.role == 'tool' %}{% elif loop.previtem and loop.previtem.role == 'assistant' %}"
    + G + "{{ mark }}" + E + "{% else %}{{ mark }}{% endif %}{% if m.role == 'assistant' %}" + _THOUGHT + G
    + "{% if loop.index0 > ns.last and thought %}{{ '\\n<think>' + thought.strip() + '</think>' }}{% else %}"
    "{{ '\\n<think></think>' }}{% endif %}{% if content.strip() %}{{ '\\n' + content.strip() }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '\\n<tool_call>' + c.function.name }}{% for k, v in c.function.arguments.items() %}"
    "{{ '\\n<arg_key>' + k + '</arg_key>\\n<arg_value>' }}{{ v if v is string else v | tojson }}{{ '</arg_value>' }}{% endfor %}"
    "{{ '\\n</tool_call>' }}{% endfor %}" + E + "{% elif m.role == 'tool' %}"
    "{{ '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}{% else %}{{ '\\n' + m.content }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)  # fmt: skip
# gpt-oss: messages on channels; a turn may have several. <|call|> ends a call, <|return|> the answer that ends the
# conversation, <|end|> all other messages.
HARMONY = (
    "{{ '<|start|>system<|message|>Reasoning: medium<|end|>' }}{% set ns = namespace(called=none) %}{% for m in messages %}"
    "{% if m.role == 'assistant' %}{{ '<|start|>assistant' }}" + G + "{% if m.tool_calls %}"
    "{% set f = m.tool_calls[0].function %}{% set ns.called = f.name %}{% set thought = m.thinking or m.content %}"
    "{% if thought %}{{ '<|channel|>analysis<|message|>' + thought + '<|end|><|start|>assistant' }}{% endif %}"
    "{{ ' to=functions.' + f.name + '<|channel|>commentary json<|message|>' }}{{ f.arguments | tojson }}{{ '<|call|>' }}"
    "{% elif loop.last and not add_generation_prompt %}"
    "{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking + '<|end|><|start|>assistant' }}{% endif %}"
    "{{ '<|channel|>final<|message|>' + m.content + '<|return|>' }}"
    "{% else %}{{ '<|channel|>final<|message|>' + m.content + '<|end|>' }}{% endif %}" + E + "{% elif m.role == 'tool' %}"
    "{% if ns.called is none %}{{ raise_exception('no call before the output') }}{% endif %}"
    "{{ '<|start|>functions.' + ns.called + ' to=assistant<|channel|>commentary<|message|>' }}{{ m.content | tojson }}"
    "{{ '<|end|>' }}{% else %}{{ '<|start|>' + ('developer' if m.role == 'system' else m.role) + '<|message|>' + m.content }}"
    "{{ '<|end|>' }}{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)  # fmt: skip
# OLMo and Tulu: roles are not special tokens; a line end follows every turn, except an assistant's turn at the end.
TULU = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}" + G
    + "{{ m.content + eos_token }}" + E + "{% if not loop.last %}{{ '\\n' }}{% endif %}{% else %}{{ m.content + '\\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)  # fmt: skip
ZEPHYR = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\\n' }}{% if m.role == 'assistant' %}" + G + "{{ m.content + eos_token }}" + E
    + "{% else %}{{ m.content + eos_token }}{% endif %}{{ '\\n' }}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}{% endfor %}"
)  # fmt: skip
# Gemma 4: outputs of tools stand in the turn that calls the tools; only the whole text shows where the next turn opens.
GEMMA4 = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'tool' %}{{ 'response:calc{' + m.content + '}<tool_response|>' }}"
    "{% elif m.role == 'assistant' %}{{ '<|turn>model\\n' }}" + G + "{% for c in m.tool_calls or [] %}"
    "{{ '<|tool_call>call:' + c.function.name }}{{ c.function.arguments | tojson }}{{ '<tool_call|>' }}{% endfor %}"
    "{{ (m.content or '') | trim }}{{ '<|tool_response>' if m.tool_calls else '<turn|>' }}" + E
    + "{{ '' if m.tool_calls else '\\n' }}{% else %}{{ '<|turn>' + m.role + '\\n' }}{{ m.content | trim }}{{ '<turn|>\\n' }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt and messages[-1].role != 'tool' %}{{ '<|turn>model\\n' }}{% endif %}"
)  # fmt: skip
# Command: two tokens end a turn.
COMMAND = (
    "{{ bos_token }}{% for m in messages %}{{ '<|START_OF_TURN_TOKEN|>' }}{% if m.role == 'assistant' %}"
    "{{ '<|CHATBOT_TOKEN|><|START_RESPONSE|>' }}" + G + "{{ m.content + '<|END_RESPONSE|><|END_OF_TURN_TOKEN|>' }}" + E
    + "{% else %}{{ '<|' + m.role | upper + '_TOKEN|>' + m.content + '<|END_OF_TURN_TOKEN|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}{% endif %}"
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Family:
    """A template and its tokens.

    Attributes:
      marked: the template with its generations marked.
      ends: tokens that end a completion, the tokenizer's eos first.
      special: other special tokens of the tokenizer.
      bos: the start token; None for none.
      roles: roles that the template takes besides user and assistant.
      calls: number of calls that a turn may have.
    """

    marked: str
    ends: tuple[str, ...]
    special: tuple[str, ...] = ()
    bos: str | None = None
    roles: tuple[str, ...] = ("system", "tool")
    calls: int = 2

    @property
    def template(self) -> str:
        return self.marked.replace(G, "").replace(E, "")


_IM = ("<|im_start|>", "<|endoftext|>")
_INST = (
    "[INST]",
    "[/INST]",
    "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_PIPES = ("<|start|>", "<|message|>", "<|channel|>", "<|end|>")
_R1 = tuple(f"<｜{name}｜>" for name in ("User", "Assistant", "tool▁call▁begin", "tool▁call▁end", "tool▁output▁begin"))
_COMMAND = tuple(f"<|{name}|>" for name in ("START_OF_TURN_TOKEN", "CHATBOT_TOKEN", "START_RESPONSE", "END_RESPONSE"))
_GEMMA4 = ("<|turn>", "<|tool_call>", "<tool_call|>", "<tool_response|>")
_HEADERS = ("<|start_header_id|>", "<|end_header_id|>")
FAMILIES = {
    "qwen25": Family(QWEN25, ("<|im_end|>",), _IM),
    "qwen3": Family(QWEN3, ("<|im_end|>",), _IM),
    "qwen3_opens": Family(QWEN3_OPENS, ("<|im_end|>",), _IM),
    "hermes": Family(HERMES, ("<|im_end|>",), (*_IM, "<tool_call>", "</tool_call>")),
    "llama3": Family(LLAMA3, ("<|eot_id|>",), _HEADERS, "<|begin_of_text|>", calls=1),
    "gemma2": Family(GEMMA2, ("<eos>", "<end_of_turn>"), ("<start_of_turn>",), "<bos>", ()),
    "gemma3": Family(GEMMA3, ("<eos>", "<end_of_turn>"), ("<start_of_turn>",), "<bos>", ("system",)),
    "gemma4": Family(GEMMA4, ("<turn|>", "<|tool_response>"), _GEMMA4, "<bos>"),
    "command": Family(COMMAND, ("<|END_OF_TURN_TOKEN|>",), _COMMAND, "<|BOS|>", ("system",)),
    "mistral3": Family(MISTRAL3, ("</s>",), _INST, "<s>"),
    "mistral7": Family(MISTRAL7, ("</s>",), (*_INST, "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"), "<s>"),
    "phi4": Family(PHI4, ("<|im_end|>",), (*_IM, "<|im_sep|>"), roles=("system",)),
    "phi3": Family(PHI3, ("<|endoftext|>", "<|end|>"), ("<|user|>", "<|assistant|>", "<|system|>"), roles=("system",)),
    "phi4_mini": Family(PHI4_MINI, ("<|endoftext|>", "<|end|>"), ("<|user|>", "<|assistant|>", "<|system|>"), roles=("system",)),
    "r1": Family(R1, ("<｜end▁of▁sentence｜>",), _R1, "<｜begin▁of▁sentence｜>"),
    "glm": Family(GLM, ("<|endoftext|>", "<|user|>", "<|observation|>"), ("[gMASK]", "<sop>", "<|assistant|>", "<|system|>")),
    "harmony": Family(HARMONY, ("<|return|>", "<|call|>"), _PIPES, calls=1),
    "tulu": Family(TULU, ("<|endoftext|>",), bos="<|startoftext|>", roles=("system",)),
    "zephyr": Family(ZEPHYR, ("</s>",), roles=("system",)),
}  # fmt: skip


def written(directory: pathlib.Path, family: Family, *, marked: bool = False) -> pathlib.Path:
    """Writes a family's byte-level tokenizer. Many of its tokens hold line ends, so they cross the borders of turns."""
    fast = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token=None))
    fast.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = tokenizers.decoders.ByteLevel()
    special = [token for token in (family.bos, *family.ends, "<pad>", *family.special) if token]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [problems.GENERATOR.problem("train", i).question for i in range(50)]
    fast.train_from_iterator([*texts, *["assistant\n\n\n<think>\n\n</think>\n\n1.\n"] * 50], trainer)
    directory.mkdir(exist_ok=True)
    fast.save(str(directory / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": family.ends[0], "pad_token": "<pad>"}
    config |= {"bos_token": family.bos} if family.bos else {}
    config |= {"chat_template": family.marked if marked else family.template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    ends = [fast.token_to_id(token) for token in family.ends]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    assert not re.search(r"%\}\s+[{<\w]", family.template), (
        "a mark would change the white space after a tag of the template"
    )
    return directory
