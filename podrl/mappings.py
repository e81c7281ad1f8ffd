"""Type aliases for mappings with keys that no dataclass declares: records, chat messages, JSON, metrics.

An alias says which kind of mapping an annotation means. All of them but Span are read-only: code that builds such a
mapping, or changes its own copy, annotates the variable as a dict. Processes that never load jax import this file, so
it needs only the standard library.
"""

from collections.abc import Mapping, Sequence
from typing import Any

# A record of a data set: 'messages', 'prompt' or a question's field, and fields for rewards; see podrl.data.shape.
Record = Mapping[str, Any]

# The fields of one task that reward functions and environments read, by the names of the data's record; JSON values.
TaskFields = Mapping[str, Any]

# The fields of several tasks, as reward functions take them: each name has a sequence with a value per task.
TaskColumns = Mapping[str, Sequence[Any]]

# A message of a conversation: 'role', 'content', and fields that templates read, such as 'tool_calls'.
ChatMessage = Mapping[str, Any]

# A function that the model may call, as {"type": "function", "function": {name, description, parameters}}.
ToolSchema = Mapping[str, Any]

# A tool as its function or its server declares it: 'name', 'description' and 'schema' of the arguments. The toolbox
# adds 'key', 'query' and 'tag' (podrl.environments.toolbox.Tool).
ToolDeclaration = Mapping[str, Any]

# A sample's entry in `podrl.types.Rollouts.episodes`: 'turns', 'metrics' and 'seconds'; also 'text' and 'reward' if the
# environment gave them.
EpisodeRecord = Mapping[str, Any]

# An entry of an episode's 'turns', or of an observation's outside answers: 'by', 'text', 'seconds', 'failed', ...
TurnRecord = Mapping[str, Any]

# Values per token of a turn or a sample, in base64, as podrl.rollout.partial packs them: 'columns' and 'paused', or for
# routes 'width' and 'bytes'.
PackedTokens = Mapping[str, Any]

# A JSON object without a narrower name: the head of a frame between processes, an HTTP body, a file such as
# config.json. The function that builds or reads it says which keys it has.
JsonObject = Mapping[str, Any]

# The JSON that a checkpoint holds for an object, besides arrays; the object's `state` and `restore` know the keys.
SavedState = Mapping[str, Any]

# A line of a journal in the run directory: podrl.environments.journal and podrl.rollout.journal give the keys.
JournalEntry = Mapping[str, Any]

# A line of metrics.jsonl or samples.jsonl: 'step', and metrics by name or the fields of a sample.
LogRecord = Mapping[str, Any]

# A piece of a process's work, a line of spans.jsonl: 'step', 'host', 'lane', 'name', 'start' and 's' (duration). Both
# times are in seconds.
Span = dict[str, Any]

# Metrics by the names of docs/metrics.md: arrays on devices until the recorder copies them to the host, then numbers.
Metrics = Mapping[str, Any]

# A configuration, or a section of one, as nested mappings: settings and sections by key (docs/reference/keys.md).
ConfigValues = Mapping[str, Any]
