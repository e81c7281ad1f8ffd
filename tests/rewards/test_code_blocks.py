"""Language, order and fences decide which code block is a completion's program; the search takes linear time."""

import pytest
from hypothesis import given, strategies
from linear import check_that_time_is_linear

from podrl.rewards.code import code_of

F, PY = "def f():\n    return 2\n", "```python\ndef f():\n    return 2\n```"


@pytest.mark.parametrize(
    ("completion", "program"),
    [
        (f"```bash\npip install x\n```\n{PY}", F),
        (f"```text\n2\n```\n{PY}\n", F),
        (f"```\n2\n```\n{PY}", F),
        (f"{PY}\nOutput:\n```\n2\n```\n```text\n3\n```", F),
        (f"{PY}\n```bash\npython a.py\n```\nDone.", F),
        (f"```python\nx = 1\n```\n{PY}", F),
        *((f"```{name}\n{F}```", F) for name in ("python3", "py", "PY3", "Python", "python3.11", "{python}",
        "{.python}", "ipython", "")),
        (f"```python title=a.py\n{F}```", F),
        (f"~~~python\n{F}~~~", F),
        (f"````python\n{F}````", F),
        (f"`````markdown\n{PY}\n`````\n{PY}", F),
        (f"```markdown\n{PY}\n```", F),
        (f"```\n{F}```\nOutput:\n```\n2\n```", F),
        (f"```python\n{F}", F),
        (f"```python\n{F}    # end```\nDone.", f"{F}    # end\n"),
        (f"```bash\npip install x\n{PY}", F),
        (f"Here:```python\n{F}```", F),
        (f"```python\r\n{F}```".replace("\n", "\r\n"), F),
        ("1. So:\n\n   ```python\n   def f():\n       return 2\n   ```", F),
        ("```python\ndef f():\n    \'\'\'\n    ```\n    x\n    ```\n    \'\'\'\n```",
        "def f():\n    \'\'\'\n    ```\n    x\n    ```\n    \'\'\'\n"),
        ("```python\nS = \'```\'\n```", "S = \'```\'\n"),
        (f"```python\nx = 1\n```\n<answer>{PY}</answer>\n```python\nf()\n```", F),
        (f"```python\nx = 1\n```<answer>{F}</answer>", F),
        (f"{PY}\n<answer>see above</answer>", F),
        (f"```solution\n{F}```", F),
        ("```python def f(): return 1```", "def f(): return 1\n"),
        ("So: ```def f(): return 1``` or ```x```", "def f(): return 1\n"),
        ("~~~py def f(): return 1~~~", "def f(): return 1\n"),
        ("<answer>```python def f(): return 1```</answer>", "def f(): return 1\n"),
        ("```python def f(): return 1```\nOutput:\n```\n1\n```", "def f(): return 1\n"),
        ("```def f(): return 1```\nOutput: ```1```", "def f(): return 1\n"),
        ("```def f():\n    return 2\n```", F),
        ("``` python x = 1\ny = x\n```", "x = 1\ny = x\n"),
        ("- > ```python\n  > def f():\n  >     return 2\n  > ```", F),
        ("```pip install x```\n" + PY, F),
        ("```python def f():\n    return 2\n```", F),
        ("> So:\n> ```python\n> def f():\n>     return 2\n> ```\n> Done.", F),
        (">```python\n>def f():\n>     return 2\n>```", F),
        ("> > ```\n> > def f():\n> >     return 2\n> > ```", F),
        ("> ```python\n> def f():\n>     '''\n>     >>> f()\n>     '''\n> ```",
        "def f():\n    '''\n    >>> f()\n    '''\n"),
        ("```python\ndef f():\n    return (2\n> 1)\n```", "def f():\n    return (2\n> 1)\n"),
        (f"```\n{F}```\nOutput:\n```\nx = 1\n```", F),
        ("```\nimport x\n```\n```\nx = 1\n```", "import x\n"),
        *((f"```{name}\n{F}```\nOutput:\n```\n2\n```", F) for name in ("cpython", "sage", "text", "Code")),
        (f"```\n{F}```\n```java\nimport x;\n```", F),
        ("```\n2\n```\n```javascript\nimport x\n```", "2\n"),
        ("x", "x"),
        ("", ""),
        ("```", "```"),
    ],
)  # fmt: skip
def test_the_program_of_a_completion(completion, program):
    assert code_of(completion) == program


@given(strategies.text(strategies.sampled_from("`~ \npy<a=>#\r"), max_size=60))
def test_no_text_of_fences_raises(text):
    assert isinstance(code_of(text), str)


@pytest.mark.parametrize(
    "piece",
    [
        "`",
        "~",
        "```",
        "```\n",
        "```a\n",
        "```a\nx```\n",
        "` ",
        "```x`",
        " ",
        "<answer>",
        "```a x",
        "~~~x",
        "~~~x`",
        "> ",
        ">",
        "> ```\n",
        "```python x```",
        "~~~x~~",
        "`````x````",
    ],
)
def test_fences_are_read_in_linear_time(piece):
    for head, tail in (("", ""), ("", "`"), ("", "x"), ("```py", "x\nx\n```")):
        check_that_time_is_linear(code_of, lambda n, head=head, tail=tail: head + piece * (n // len(piece)) + tail)
