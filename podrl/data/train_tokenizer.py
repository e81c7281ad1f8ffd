"""Makes the tokenizers of the embedded models: `python -m podrl.data.train_tokenizer --out=DIR [--calls|--search]`.

The tokenizer is a unigram model of the embedded task's language. Every digit, punctuation mark and word of the task is
a piece of its own. Words of everyday arithmetic and parts of words are pieces as far as the vocabulary has room for
them. All other ASCII text is spelled by letters. With --calls, the tags of a tool's call and output are pieces as well,
with the last ids. With --search, the words are the words of the task 'facts', and the tags are the tags of a search and
of a citation.

The trainers of `tokenizers` and SentencePiece are not used. The trainer of `tokenizers` visits words in the random
order of a hash table, so two runs differ. Both trainers break the few words of so small a language into fragments,
which costs a third more tokens per prompt.
"""

import collections
import json
import math
import re
import string

import tokenizers
from absl import app, flags
from etils import epath
from tokenizers import decoders, models, pre_tokenizers, processors

from podrl.data import facts, problems, template

VOCAB_SIZE = 384
CORPUS_PROBLEMS = 3000
SPACE = "▁"

CONTROLS = ("<pad>", "<eos>", "<bos>", "<unk>")
TAGS = (template.REASONING_START, template.REASONING_END, template.ANSWER_START, template.ANSWER_END)
CALL_TAGS = (template.CALL_START, template.CALL_END, template.OUTPUT_START, template.OUTPUT_END)
SEARCH_TAGS = (
    *(template.SEARCH_START, template.CALL_END, template.OUTPUT_START, template.OUTPUT_END),
    *(template.SNIPPET_START, template.SNIPPET_END, template.CITE_START, template.CITE_END),
)
TURNS = ("<start_of_turn>", "<end_of_turn>")

# Gemma's form: system text opens the first user turn, 'assistant' is called 'model'.
CHAT_TEMPLATE = """{{ bos_token }}
{%- set lead = namespace(text='') -%}
{%- for message in messages -%}
{%- if message['role'] == 'system' -%}
{%- set lead.text = (message['content'] | trim) + '\\n\\n' -%}
{%- elif message['role'] in ('user', 'assistant') -%}
{{ '<start_of_turn>' + ('user\\n' + lead.text if message['role'] == 'user' else 'model\\n') -}}
{{ (message['content'] | trim) + '<end_of_turn>\\n' }}
{%- set lead.text = '' -%}
{%- else -%}
{{ raise_exception('unknown role ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}
"""

# Words of arithmetic problems that the embedded task does not use, the commonest first.
_EVERYDAY = """
user model The In answer is the a of to and in he she it for his her they at each on day will if all was an one two
three half that are per from then be there after total much more than many number cost week dollars hours
as time first twice times people old year years only days weeks hour minutes less money price pay
made sold used bought takes left needs every another second third last next same school home work make
spent earn eat sell buy get gets got give gave take would can their them so by or not you your think write
problem step final single between reasoning given through what who when where which while up out into also
"""
# Words that open a text or a turn, so that no space stands before them.
_UNSPACED = ("user", "model", "The", "In")


def train(*, calls: bool = False, search: bool = False) -> tokenizers.Tokenizer:
    """Makes the embedded tokenizer, the same bytes on every call and machine.

    Args:
      calls: True if the tags of a tool's call and output are pieces, too.
      search: True for the tokenizer of the task 'facts', with the tags of a search and of a citation.
    """
    count = collections.Counter(_words(_texts_of_facts() if search else _corpus()))
    everyday, tags = _EVERYDAY.split(), SEARCH_TAGS if search else CALL_TAGS * calls
    for rank, word in enumerate(everyday):
        word = word if word in _UNSPACED else SPACE + word
        count[word] = count[word] or len(everyday) - rank
    letters = [SPACE, "\n", *string.digits, *string.ascii_letters, *string.punctuation]
    room = VOCAB_SIZE - len(CONTROLS) - len(TAGS) - len(TURNS) - len(letters)
    whole = sorted((word for word in count if len(word) > 1), key=lambda word: (-count[word], word))[:room]
    total = sum(count.values())
    # The score of a word is its log-probability. A word scores more than a fragment, and a fragment more than a letter.
    # So a text is cut into nearly the fewest pieces possible.
    vocab = [(piece, 0.0) for piece in (*CONTROLS, *TAGS, *TURNS)]
    vocab += [(letter, -20.0) for letter in letters]
    vocab += [(word, round(math.log(count[word] / total), 4)) for word in whole]
    vocab += [(piece, -15.0) for piece in _fragments(whole)[: room - len(whole)]]
    assert len(vocab) == VOCAB_SIZE, len(vocab)
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=CONTROLS.index("<unk>"), byte_fallback=False))
    tokenizer.pre_tokenizer = _splitter()
    tokenizer.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="never")
    tokenizer.add_special_tokens([tokenizers.AddedToken(t, special=True, normalized=False) for t in CONTROLS + TURNS])
    tokenizer.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in TAGS])
    if tags:
        tokenizer.add_tokens([tokenizers.AddedToken(t, special=False, normalized=False) for t in tags])
    # A text that is not a conversation begins with the start token, in podrl and in transformers.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B:1", special_tokens=[("<bos>", CONTROLS.index("<bos>"))]
    )
    assert tokenizer.get_vocab_size() == VOCAB_SIZE + len(tags), tokenizer.get_vocab_size()
    return tokenizer


def write(directory: str | epath.PathLike, *, calls: bool = False, search: bool = False) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json in the form that `transformers` reads.

    Args:
      directory: directory to write to; it is made if it does not exist.
      calls, search: kind of the tokenizer, see `train`.
    """
    path = epath.Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = train(calls=calls, search=search)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "additional_special_tokens": list(TURNS),
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation = {
        "bos_token_id": tokenizer.token_to_id("<bos>"),
        "eos_token_id": [tokenizer.token_to_id("<eos>"), tokenizer.token_to_id("<end_of_turn>")],
        "pad_token_id": tokenizer.token_to_id("<pad>"),
    }
    (path / "tokenizer.json").write_text(tokenizer.to_str(pretty=True) + "\n")
    (path / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (path / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def _corpus() -> list[str]:
    return [problems.GENERATOR.problem("train", index).question for index in range(CORPUS_PROBLEMS)]


def _texts_of_facts() -> list[str]:
    """Lists texts of the task 'facts', with a line break inside each town's name, so that both halves are pieces."""
    texts = [facts.GENERATOR.problem("train", index).question for index in range(CORPUS_PROBLEMS)]
    # A query begins with the building, and a statement with its verb. Both stand right after a tag, without a space, so
    # the corpus also has them at the beginning of a text.
    texts += [text for one in facts.documents() for text in (one.shown, one.building)]
    texts += [facts.GENERATOR.problem("train", index).statement for index in range(CORPUS_PROBLEMS)]
    names = re.compile(f"({'|'.join(facts.BEGINNINGS)})({'|'.join(facts.ENDS)})")
    return [names.sub(r"\1\n\2", text) for text in texts]


def _words(texts: list[str]) -> list[str]:
    """Lists the words of texts as the splitter cuts them; a space before a word is the word's first character."""
    return [word for text in texts for word in re.findall(rf"{SPACE}?[A-Za-z]+", text.replace(" ", SPACE))]


def _fragments(words: list[str]) -> list[str]:
    """Lists parts of words, of two to four letters; first the part that saves most pieces compared with letters."""
    parts = collections.Counter(
        bare[i : i + size]
        for bare in sorted({word.lstrip(SPACE).lower() for word in words})
        for size in (2, 3, 4)
        for i in range(len(bare) - size + 1)
    )
    return sorted((p for p in parts if p not in words), key=lambda p: (-parts[p] * (len(p) - 1), p))


def _splitter() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "isolated"),
            pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="never", split=True),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Punctuation("isolated"),
        ]
    )


def main(argv: list[str]) -> None:
    if len(argv) > 1:
        raise app.UsageError(f"Unknown arguments {argv[1:]}: the flags are --out=DIR, --calls and --search.")
    write(_OUT.value, calls=_CALLS.value, search=_SEARCH.value)


if __name__ == "__main__":
    _OUT = flags.DEFINE_string("out", None, "Directory to write the tokenizer files to.", required=True)
    _CALLS = flags.DEFINE_bool("calls", False, "Adds the tags of a tool's call and output.")
    _SEARCH = flags.DEFINE_bool("search", False, "Makes the tokenizer of the task 'facts'.")
    app.run(main)
